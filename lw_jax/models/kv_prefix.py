"""Keys and values of a decoder as arrays of their own: taken from a text, and put before a text in a cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lw_jax.core.types import Tree
from lw_jax.models import decoder, rotary
from lw_jax.models.decoder import Cache, DecoderConfig, KVPrefix, Mode, SharedPrefix


def open_cache(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: DecoderConfig,
    size: int,
    *,
    prefix: KVPrefix,
    shared_prefix: SharedPrefix | None = None,
    mode: Mode = Mode(),  # noqa: B008  (frozen)
) -> Cache:
    """Returns a cache of `size` positions that begins with a shared prefix, read once, and each row's own prefix."""
    decoder.check_length(cfg, size)
    _, rows, length, *_ = prefix.k.shape
    cache = read_once(params, cfg, (rows, size), shared_prefix, prefix.k.dtype, mode)
    start = 0 if shared_prefix is None else shared_prefix.x.shape[1]
    seen = cache.valid.sum(axis=1, keepdims=True, dtype=jnp.int32)
    return Cache(
        _put(cache.k, decoder.rotate_keys(cfg, prefix, seen=seen), start),
        _put(cache.v, prefix.v, start),
        cache.valid.at[:, start : start + length].set(prefix.mask),
        cache.used + length,
    )


def prepend(first: KVPrefix, prefix: KVPrefix) -> KVPrefix:
    """Returns each row's prefix behind `first`, which is the same in every row."""
    same = repeat(first, len(prefix.mask))
    k, v = (jnp.concatenate(pair, axis=2) for pair in ((same.k, prefix.k), (same.v, prefix.v)))
    return KVPrefix(k, v, jnp.concatenate([same.mask, prefix.mask], axis=1))


def repeat(one: KVPrefix, rows: int) -> KVPrefix:
    """Returns a prefix of one row in so many rows."""
    k, v = (jnp.broadcast_to(leaf, (leaf.shape[0], rows, *leaf.shape[2:])) for leaf in (one.k, one.v))
    return KVPrefix(k, v, decoder.repeat(one.mask, rows))


def take(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    shared_prefix: SharedPrefix | None = None,
    mode: Mode = Mode(),  # noqa: B008  (frozen)
) -> KVPrefix:
    """Returns the decoder's own keys, their rotation removed, and values of x behind a shared prefix."""
    rows, length, _ = x.shape
    start = 0 if shared_prefix is None else shared_prefix.x.shape[1]
    cache = read_once(params, cfg, (rows, start + length), shared_prefix, x.dtype, mode)
    found = decoder.forward(params, cfg, x, mask=mask, cache=cache, mode=mode).cache
    assert found is not None, "a cache was given"
    return of_cache(cfg, found, mask=mask, start=start)


def of_cache(cfg: DecoderConfig, cache: Cache, *, mask: Bool[Array, "b t"], start: int = 0) -> KVPrefix:
    """Returns the keys, their rotation removed, and values of the tokens that were read from position `start` on."""
    assert isinstance(cache.k, jax.Array) and isinstance(cache.v, jax.Array), "given stacked"
    decoder.check_length(cfg, cache.valid.shape[1])
    seen = cache.valid[:, :start].sum(axis=1, keepdims=True, dtype=jnp.int32)
    positions = jnp.maximum(seen + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    cos, sin = rotary.angles(
        positions, size=cfg.rotated or cfg.head_dim, theta=cfg.rope_theta, scaling=cfg.rope_scaling
    )
    power = cos * cos + sin * sin  # 1 but for LongRope's gain
    k, v = (one[:, :, start : start + mask.shape[1]] for one in (cache.k, cache.v))
    return KVPrefix(jax.vmap(lambda k: rotary.rotate(k, cos / power, -sin / power))(k), v, mask)


def read_once(  # noqa: PLR0913
    params: Tree, cfg: DecoderConfig, shape: tuple[int, int], shared: SharedPrefix | None, dtype: Any, mode: Mode
) -> Cache:
    """Returns a cache of (rows, positions) that begins in every row with a shared prefix, computed in one."""
    rows, _ = shape
    cache = decoder.empty_cache(cfg, *shape, dtype)
    if shared is None:
        return cache
    mode = dataclasses.replace(mode, constrain=lambda x: x)  # one row does not divide over devices
    empty = decoder.empty_cache(cfg, 1, shared.x.shape[1], dtype)
    one = decoder.forward(params, cfg, shared.x, mask=shared.mask, cache=empty, mode=mode).cache
    assert one is not None, "a cache was given"
    valid = cache.valid.at[:, : shared.x.shape[1]].set(decoder.repeat(one.valid, rows))
    return Cache(_put(cache.k, one.k, 0), _put(cache.v, one.v, 0), valid, one.used)


def _put(cache: jax.Array | tuple, new: jax.Array | tuple, start: int) -> jax.Array:
    assert isinstance(cache, jax.Array) and isinstance(new, jax.Array), "the cache is opened with stacked layers"
    new = jnp.broadcast_to(new, (new.shape[0], cache.shape[1], *new.shape[2:]))
    return cache.at[:, :, start : start + new.shape[2]].set(new)
