"""Keys and values of a decoder as arrays of their own: taken from a text, and put before a text in a cache."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.types import Tree
from lw_jax.models import decoder, rotary
from lw_jax.models.attention import LEAST
from lw_jax.models.decoder import Cache, DecoderConfig, KVPrefix, Mode, PackedPrefix, SharedPrefix

Sizes = tuple[tuple[int, ...], ...]  # keys of each head of keys, by layer


def all_keys(cfg: DecoderConfig, length: int) -> Sizes:
    """Returns the sizes of heads that keep every key of a text."""
    return ((length,) * cfg.kv_heads,) * cfg.layers


def open_cache(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: DecoderConfig,
    size: int,
    *,
    prefix: KVPrefix | None = None,
    packed: PackedPrefix | None = None,
    shared_prefix: SharedPrefix | None = None,
    mode: Mode = Mode(),
) -> Cache:
    """Returns a cache of `size` positions that begins with a shared prefix, read once, and each row's own prefix.

    A packed prefix stands behind both and takes none of the positions.
    """
    given = packed if prefix is None else prefix
    assert given is not None, "of embeddings alone nothing stands before"
    decoder.check_length(cfg, size)
    rows = len(given.v) if isinstance(given, PackedPrefix) else len(given.mask)
    cache = read_once(params, cfg, (rows, size), shared_prefix, given.v.dtype, mode)
    if prefix is not None:
        start = 0 if shared_prefix is None else shared_prefix.x.shape[1]
        cache = _append(cfg, cache, prefix, start)
    return cache._replace(packed=packed)


def _append(cfg: DecoderConfig, cache: Cache, prefix: KVPrefix, start: int) -> Cache:
    """Returns the cache with each row's prefix from position `start` on, behind what it has."""
    length, size = prefix.mask.shape[1], cache.valid.shape[1]
    seen, bias = cache.valid.sum(axis=1, keepdims=True, dtype=jnp.int32), prefix.bias
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (start, size - start - length), (0, 0)))
    return Cache(
        _put(cache.k, decoder.rotate_keys(cfg, prefix, seen=seen), start),
        _put(cache.v, prefix.v, start),
        cache.valid.at[:, start : start + length].set(prefix.mask),
        cache.used + length,
        bias,
    )


def choose(prefix: KVPrefix, kept: Bool[Array, "l b m k"], bias: Float[Array, "l b m k"] | None = None) -> KVPrefix:
    """Returns a prefix of which each head has the `kept` keys alone, at their own positions."""
    bias = jnp.zeros(kept.shape) if bias is None else bias
    return prefix._replace(bias=jnp.where(kept, bias, LEAST))


def takes_packed(cfg: DecoderConfig) -> bool:
    """Returns whether a reader can have the kept keys without the positions of what stands between them."""
    return not cfg.window and not isinstance(cfg.rope_scaling, rotary.LongRope)


def pack(  # noqa: PLR0913
    cfg: DecoderConfig,
    mask: Bool[Array, "b m"],
    bias: Float[Array, "l b m k"],
    sizes: Sizes,
    take: Callable[[Int[Array, ""], Int[Array, ""], Int[Array, "b s"]], tuple[jax.Array, jax.Array]],
    *,
    seen: jax.Array | int,
) -> PackedPrefix:
    """Returns the kept keys of a prefix, in each layer and head so many of `sizes`, `seen` real tokens before them.

    They take no memory but their own, and no other key is computed but what fills a head's last piece. A row with fewer
    has filling, which no query sees. `bias` is that of `choose`; `take` returns keys, not turned, and values [b s e] of
    a layer's head at the places i32[b s].
    """
    assert takes_packed(cfg), "a window and LongRope go by positions"
    counts = np.array(sizes, np.int32).reshape(cfg.layers, cfg.kv_heads)
    by_layer = counts.sum(axis=1, dtype=np.int32)
    first, most = np.cumsum(by_layer, dtype=np.int32) - by_layer, int(by_layer.max(initial=0))
    size = max(1, math.ceil(counts.mean()))  # of a piece: at most as many again are computed, in two pieces a head
    pieces = [(*where, start) for where, count in np.ndenumerate(counts) for start in range(0, count, size)]
    bias, (cos, sin) = jnp.where(mask[None, :, :, None], bias, LEAST), decoder.prefix_angles(cfg, mask, seen=seen)
    order = jnp.argsort(bias <= LEAST, axis=2)  # stable: the kept ones in their order
    order = jnp.pad(order, ((0, 0), (0, 0), (0, size), (0, 0)))
    by_row = jax.vmap(lambda x, places: x[places])

    def piece(packed: tuple[jax.Array, ...], inputs: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        layer, head, start, to = inputs
        places = jax.lax.dynamic_slice_in_dim(order[layer, :, :, head], start, size, axis=1)
        k, v = take(layer, head, places)
        k = rotary.rotate(k[:, :, None], by_row(cos, places), by_row(sin, places))[:, :, 0]
        pairs = zip(packed, (k, v, by_row(bias[layer, :, :, head], places)), strict=True)
        # What stands behind a head's keys is filling, over which the next head's are written.
        return tuple(jax.lax.dynamic_update_slice_in_dim(*pair, to, axis=1) for pair in pairs), None

    spec = jax.eval_shape(take, jnp.int32(0), jnp.int32(0), order[0, :, :size, 0])[0]
    room = len(mask), int(by_layer.sum()) + max(most, size)
    none = (jnp.zeros((*room, cfg.head_dim), spec.dtype),) * 2 + (jnp.full(room, LEAST, bias.dtype),)
    to = np.cumsum(counts, dtype=np.int32).reshape(counts.shape) - counts
    inputs = np.array([(*at, to[at[:2]] + at[2]) for at in pieces], np.int32).reshape(-1, 4)
    (k, v, bias), _ = jax.lax.scan(piece, none, jnp.asarray(inputs))
    head = np.repeat(np.tile(np.arange(cfg.kv_heads), cfg.layers), counts.ravel())  # of each place
    return PackedPrefix(
        k,
        v,
        bias,
        head=jnp.asarray(np.pad(head, (0, room[1] - len(head))), jnp.int32),
        first=jnp.asarray(first),
        count=jnp.asarray(by_layer),
        places=jnp.arange(most, dtype=jnp.int32),
        length=mask.sum(axis=1, keepdims=True, dtype=jnp.int32),
    )


def prepend(first: KVPrefix, prefix: KVPrefix) -> KVPrefix:
    """Returns each row's prefix behind `first`, which is the same in every row."""
    same = repeat(first, len(prefix.mask))
    k, v = (jnp.concatenate(pair, axis=2) for pair in ((same.k, prefix.k), (same.v, prefix.v)))
    before = ((0, 0), (0, 0), (same.k.shape[2], 0), (0, 0))
    bias = None if prefix.bias is None else jnp.pad(prefix.bias, before)
    return KVPrefix(k, v, jnp.concatenate([same.mask, prefix.mask], axis=1), bias)


def repeat(one: KVPrefix, rows: int) -> KVPrefix:
    """Returns a prefix of one row, with all of its keys, in so many rows."""
    assert one.bias is None, "what stands before messages is whole"
    by_row = jax.vmap(functools.partial(decoder.repeat, rows=rows))
    return KVPrefix(by_row(one.k), by_row(one.v), decoder.repeat(one.mask, rows))


def take(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    shared_prefix: SharedPrefix | None = None,
    mode: Mode = Mode(),
) -> KVPrefix:
    """Returns the decoder's own keys, their rotation removed, and values of x behind a shared prefix."""
    rows, length, _ = x.shape
    start = 0 if shared_prefix is None else shared_prefix.x.shape[1]
    cache = read_once(params, cfg, (rows, start + length), shared_prefix, x.dtype, mode)
    _, cache = decoder.extend(params, cfg, x, mask=mask, cache=cache, mode=mode)
    return of_cache(cfg, cache, mask=mask, start=start)


def of_cache(cfg: DecoderConfig, cache: Cache, *, mask: Bool[Array, "b t"], start: int = 0) -> KVPrefix:
    """Returns the keys, their rotation removed, and values of the tokens that were read from position `start` on."""
    assert isinstance(cache.k, jax.Array) and isinstance(cache.v, jax.Array), "given stacked"
    decoder.check_length(cfg, cache.valid.shape[1])
    seen = cache.valid[:, :start].sum(axis=1, keepdims=True, dtype=jnp.int32)
    cos, sin = decoder.prefix_angles(cfg, mask, seen=seen)
    power = cos * cos + sin * sin  # 1 but for LongRope's gain
    stop = start + mask.shape[1]
    keys = jax.vmap(lambda k: rotary.rotate(k, cos / power, -sin / power))(cache.k[:, :, start:stop])
    return KVPrefix(keys, cache.v[:, :, start:stop], mask)


def read_once(  # noqa: PLR0913
    params: Tree, cfg: DecoderConfig, shape: tuple[int, int], shared: SharedPrefix | None, dtype: Any, mode: Mode
) -> Cache:
    """Returns a cache of (rows, positions) that begins in every row with a shared prefix, computed in one."""
    rows, _ = shape
    cache = decoder.empty_cache(cfg, *shape, dtype)
    if shared is None:
        return cache
    mode = dataclasses.replace(mode, constrain=decoder.unchanged)  # one row does not divide over devices
    empty = decoder.empty_cache(cfg, 1, shared.x.shape[1], dtype)
    _, prefix_cache = decoder.extend(params, cfg, shared.x, mask=shared.mask, cache=empty, mode=mode)
    valid = cache.valid.at[:, : shared.x.shape[1]].set(decoder.repeat(prefix_cache.valid, rows))
    return Cache(_put(cache.k, prefix_cache.k, 0), _put(cache.v, prefix_cache.v, 0), valid, prefix_cache.used)


def _put(cache: jax.Array | tuple, new: jax.Array | tuple, start: int) -> jax.Array:
    assert isinstance(cache, jax.Array) and isinstance(new, jax.Array), "the cache is opened with stacked layers"
    new = jnp.broadcast_to(new, (new.shape[0], cache.shape[1], *new.shape[2:]))
    return cache.at[:, :, start : start + new.shape[2]].set(new)
