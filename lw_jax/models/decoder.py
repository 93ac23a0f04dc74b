"""One decoder body for every reader: Llama (2, 3, 3.1, 3.2), Qwen (2, 2.5), Phi-3 and StableLM-2.

Parameters are a plain nested dict, layers stacked on a leading axis (`docs/architecture.md` lists path and shape), so
that placement, loading and quantisation treat all families alike. A matrix may be packed (`quant.py`), and may have a
LoRA pair beside it (`lora.py`). Arrays in, arrays out: no mesh, no files.
Semantics follow transformers' LlamaModel, Qwen2Model, Phi3Model and StableLmModel, which the parity tests compare
against.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.models import projections, quant, rotary
from lw_jax.models.attention import PackedKeys, attention, attention_behind
from lw_jax.models.products import PRODUCT, from_bits, save, stack_dtype, wide_product


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a decoder; any other setting of a checkpoint is refused at loading."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    rope_scaling: rotary.Llama3Scaling | rotary.LongRope | None = None
    norm: str = "rms"  # "rms" | "layer": LayerNorm with a bias
    rotated: int = 0  # leading values of a head with rotary positions (0: all)
    window: int = 0  # sliding attention window, the query included, without a causal mask to both sides (0: none)


def unchanged(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Mode:
    """Execution options of the body: they change memory, speed or direction, but no weight."""

    causal: bool = True
    remat: str = "none"  # "none": matmuls are saved | "full": each layer is recomputed
    factors: str | None = None  # dtype of the factors of products; None: that of the values
    constrain: Callable[[jax.Array], jax.Array] = unchanged  # applied to the residual stream [b t d]

    @property
    def saves_products(self) -> bool:
        return self.remat == "none"


class Cache(NamedTuple):
    """Keys and values of all layers; slots fill from the left, `valid` marks real tokens."""

    k: Float[Array, "l b s k e"] | tuple[Float[Array, "1 b s k e"], ...]  # stacked, or by `decode.unstack_memory`
    v: Float[Array, "l b s k e"] | tuple[Float[Array, "1 b s k e"], ...]
    valid: Bool[Array, "b s"]
    used: Int[Array, ""]  # slots written so far, the same for every row
    # As of `KVPrefix`, stacked or by layer as k and v are.
    bias: Float[Array, "l b s k"] | tuple[Float[Array, "b s k"], ...] | None = None
    packed: "PackedPrefix | None" = None  # stands before what x continues, behind the slots used when it was put there


class SharedPrefix(NamedTuple):
    """Prefix of every row of a batch: processed once, without gradients."""

    x: Float[Array, "1 o d"]
    mask: Bool[Array, "1 o"]


class KVPrefix(NamedTuple):
    """Keys, not rotated, and values of every layer: positions that the body attends to without computing them."""

    k: Float[Array, "l b m k e"]
    v: Float[Array, "l b m k e"]
    mask: Bool[Array, "b m"]
    bias: Float[Array, "l b m k"] | None = None  # of each key's scores, `attention.LEAST` where a head lacks it


class PackedPrefix(NamedTuple):
    """A prefix of which each head of each layer has keys and values of its own: one layer's behind the other's.

    Behind them is room for as many as the largest layer has, so that all layers are read in slices of that size.
    """

    k: Float[Array, "b n e"]  # turned
    v: Float[Array, "b n e"]
    bias: Float[Array, "b n"]  # of the scores; `attention.LEAST` where a row has fewer
    head: Int[Array, " n"]  # of keys
    first: Int[Array, " l"]  # place of each layer's
    count: Int[Array, " l"]
    places: Int[Array, " m"]  # 0, 1 ... of the largest layer
    length: Int[Array, "b 1"]  # positions of the whole prefix, those without keys too

    def of_layer(self, number: Int[Array, ""]) -> PackedKeys:
        """Returns a layer's keys, in as many places as the largest layer has."""

        def take(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, self.first[number], len(self.places), axis)

        head = jnp.where(self.places < self.count[number], take(self.head, 0), -1)
        return PackedKeys(take(self.k, 1), take(self.v, 1), take(self.bias, 1), head)


class Output(NamedTuple):
    """Result of `forward`."""

    hidden: Float[Array, "b t d"]  # after the final norm
    mixed: Float[Array, "b t d"] | None  # weighted sum over layers, when `mix` was given
    states: Float[Array, "n b t d"] | None = None  # inputs of the layers `taps`, when they were named


def abstract(cfg: DecoderConfig, dtype: jax.typing.DTypeLike, *, factors: jax.typing.DTypeLike | None = None) -> Tree:
    """Returns the parameter tree as shapes, for loader, placement, planner and restore.

    With `factors` of another dtype, what is only multiplied has it: the layers' matrices (in `products.stack_dtype`),
    and a head of its own even where the embedding is tied.
    """
    d, h, k, e, f, n = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.ffn, cfg.layers
    layers = {
        "attn_norm": (n, d),
        "mlp_norm": (n, d),
        "q": (n, h, e, d),
        "k": (n, k, e, d),
        "v": (n, k, e, d),
        "o": (n, d, h, e),
        "gate": (n, f, d),
        "up": (n, f, d),
        "down": (n, d, f),
    }
    if cfg.qkv_bias:
        layers |= {"q_bias": (n, h, e), "k_bias": (n, k, e), "v_bias": (n, k, e)}
    shapes = {"embed": (cfg.vocab, d), "norm": (d,), "layers": layers}
    if cfg.norm == "layer":
        layers |= {"attn_norm_bias": (n, d), "mlp_norm_bias": (n, d)}
        shapes["norm_bias"] = (d,)
    dtype = jnp.dtype(dtype)
    factors = dtype if factors is None else jnp.dtype(factors)
    if not cfg.tied or factors != dtype:
        shapes["head"] = (cfg.vocab, d)

    def describe(path: tuple, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        if path[0].key == "layers" and path[-1].key in quant.MATRICES:
            return jax.ShapeDtypeStruct(shape, stack_dtype(factors, dtype))
        return jax.ShapeDtypeStruct(shape, factors if path[-1].key == "head" else dtype)

    return jax.tree_util.tree_map_with_path(describe, shapes, is_leaf=lambda node: isinstance(node, tuple))


def init(key: jax.Array, cfg: DecoderConfig, dtype: jax.typing.DTypeLike, *, scale: float = 0.02) -> Tree:
    """Draws random weights (normal matrices, unit norms, zero biases): for self-made readers and tests."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract(cfg, dtype))
    keys = jax.random.split(key, len(leaves))
    out = []
    for (path, leaf), leaf_key in zip(leaves, keys, strict=True):
        name = str(path[-1].key)
        if name.endswith("norm"):
            out.append(jnp.ones(leaf.shape, dtype))
        elif name.endswith("bias"):
            out.append(jnp.zeros(leaf.shape, dtype))
        else:
            out.append((jax.random.normal(leaf_key, leaf.shape) * scale).astype(dtype))
    return jax.tree_util.tree_unflatten(treedef, out)


def embed(params: Tree, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    return jnp.take(params["embed"], ids, axis=0)


def head(params: Tree) -> Float[Array, "v d"]:
    """Returns the output projection: the embedding table where they are tied and of one dtype."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Tree, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
    """Applies the head and returns fp32."""
    return wide_product("btd,vd->btv", hidden, head(params))


def empty_cache(cfg: DecoderConfig, batch: int, slots: int, dtype: jax.typing.DTypeLike) -> Cache:
    shape = (cfg.layers, batch, slots, cfg.kv_heads, cfg.head_dim)
    return Cache(
        jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch, slots), bool), jnp.zeros((), jnp.int32)
    )


def repeat(one: jax.Array, rows: int) -> jax.Array:
    """Returns [1 ...] as [rows ...]."""
    return jnp.broadcast_to(one, (rows, *one.shape[1:]))


def forward(  # noqa: PLR0913  (a pass over whole texts; four of them have one meaning everywhere)
    params: Tree,
    cfg: DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    shared_prefix: SharedPrefix | None = None,
    kv_prefix: KVPrefix | None = None,
    mix: Float[Array, " n"] | None = None,
    taps: tuple[int, ...] = (),
    segments: Int[Array, "b t"] | None = None,
    mode: Mode = Mode(),
) -> Output:
    """Runs the body over embeddings.

    `mask` marks real tokens; padding may be anywhere and changes no value at a real position, as positions count real
    tokens. With a shared prefix, x continues it in every row, without mix; a `kv_prefix` stands between the two. `mix`
    (layers + 1 weights) requests the weighted sum, in fp32, of the RMS-normalised residual stream before the first and
    after each layer (ComprExIT's layer mix, after a softmax); `taps` requests the residual stream before the layers of
    these numbers. `segments` packs several texts into a row: a position attends to those of its own number and to
    those of number 0, which stand first and are common to all; each text's positions continue the common ones.
    """
    assert mix is None or (shared_prefix is None and kv_prefix is None), "a mix is of a whole text"
    turned = bias = None
    if segments is not None:
        check_length(cfg, x.shape[1], packed=True)
    if kv_prefix is None:
        assert shared_prefix is None or not isinstance(cfg.rope_scaling, rotary.LongRope), "it goes by the whole length"
    else:
        opening = 0 if shared_prefix is None else shared_prefix.x.shape[1]
        check_length(cfg, opening + kv_prefix.mask.shape[1] + x.shape[1])
        seen = 0 if shared_prefix is None else shared_prefix.mask.sum(axis=1, keepdims=True, dtype=jnp.int32)
        turned = rotate_keys(cfg, kv_prefix, seen=seen), kv_prefix.v
        if kv_prefix.bias is not None:
            bias = jnp.pad(kv_prefix.bias, ((0, 0), (0, 0), (opening, x.shape[1]), (0, 0)))
    layer = _checkpointed(cfg, _share(cfg, mask, _find_past(mask, shared_prefix, kv_prefix), mode, segments), mode)
    prefix_layer = None
    if shared_prefix is not None:
        shared = _share(cfg, shared_prefix.mask, _find_past(shared_prefix.mask), mode)
        prefix_layer = functools.partial(_layer, cfg, shared)

    def body(carry, inputs):
        x, mixed, prefix = carry
        weights, share, slots, bias = inputs
        before = () if slots is None else (slots,)
        if prefix_layer is not None:
            prefix, prefix_kv = prefix_layer(prefix, weights, ())
            before = (prefix_kv, *before)
        x = mode.constrain(x)
        if share is not None:
            mixed = mixed + weigh(x, share, cfg.norm_eps)
        tapped = x if taps else None
        x, _ = layer(x, weights, before, bias)
        return (x, mixed, prefix), tapped

    mixed, shares = (None, None) if mix is None else (jnp.zeros(x.shape, jnp.float32), mix[:-1])
    prefix = None if shared_prefix is None else shared_prefix.x
    (x, mixed, _), tapped = jax.lax.scan(body, (x, mixed, prefix), (params["layers"], shares, turned, bias))
    if mix is not None:
        mixed = (mixed + weigh(x, mix[-1], cfg.norm_eps)).astype(x.dtype)
    states = None if tapped is None else tapped[jnp.asarray(taps)]
    return Output(_normalise(cfg, x, params, "norm"), mixed, states)


def extend(  # noqa: PLR0913  (as `forward`)
    params: Tree,
    cfg: DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    cache: Cache,
    mode: Mode = Mode(),
) -> tuple[Float[Array, "b t d"], Cache]:
    """Runs the body over embeddings that continue a cache; returns them after the final norm, and the cache with them.

    `mask` as in `forward`. A LongRope model must not pass the length where the frequencies change (`decode` processes
    the whole text again there). The layers may be arrays of their own (`decode.unstack_layers`); the cache is then too.
    """
    past, cache = _find_cached(mask, cache)
    layer = _checkpointed(cfg, _share(cfg, mask, past, mode), mode)
    if isinstance(params["layers"], tuple):
        x, kv = _run_apart(layer, params["layers"], cache, x, mode)
    else:
        # The cache is carried, so that a layer writes its new tokens in place.
        def body(carry, inputs):
            x, kv = carry
            weights, number, bias = inputs
            packed = None if cache.packed is None else cache.packed.of_layer(number)
            return layer(mode.constrain(x), weights, _LayerCache(kv[0], kv[1], number), bias, packed), None

        inputs = (params["layers"], jnp.arange(cfg.layers, dtype=jnp.int32), cache.bias)
        (x, kv), _ = jax.lax.scan(body, (x, (cache.k, cache.v)), inputs)
    return _normalise(cfg, x, params, "norm"), cache._replace(k=kv[0], v=kv[1], used=cache.used + x.shape[1])


def _checkpointed(cfg: DecoderConfig, shared: "_Shared", mode: Mode) -> Callable:
    return checkpoint_layer(functools.partial(_layer, cfg, shared), mode.saves_products, scanned=cfg.layers > 1)


def _run_apart(
    layer: Callable, layers: tuple[Tree, ...], cache: Cache, x: jax.Array, mode: Mode
) -> tuple[jax.Array, tuple]:
    """Returns the output of layer after layer, arrays of their own, and the keys and values of the cache."""
    written = []
    for number, weights in enumerate(layers):
        bias = None if cache.bias is None else cache.bias[number]
        packed = None if cache.packed is None else cache.packed.of_layer(jnp.int32(number))
        layer_cache = _LayerCache(cache.k[number], cache.v[number], jnp.int32(0))
        x, pair = layer(mode.constrain(x), weights, layer_cache, bias, packed)
        written.append(pair)
    return x, tuple(zip(*written, strict=True))


class Attended(NamedTuple):
    """What a layer attends with and to, queries and keys turned at their positions, and what it returns."""

    q: Float[Array, "b t h e"]
    k: Float[Array, "b s k e"]
    v: Float[Array, "b s k e"]
    attend: Bool[Array, "b 1 t s"]  # the keys that a query sees
    out: Float[Array, "b t d"]  # the residual stream behind the layer


def visit_attention(  # noqa: PLR0913  (as `forward`)
    params: Tree,
    cfg: DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    visit: Callable[[Attended], Tree],
    cache: Cache | None = None,
    mode: Mode = Mode(),
) -> tuple[Tree, Cache | None]:
    """Returns `visit` of every layer, stacked, and the cache.

    With a cache x continues it, and its slots are the keys.
    """
    assert cache is None or (cache.bias is None and cache.packed is None), "of a reader's own keys alone"
    past, cache = (_find_past(mask), None) if cache is None else _find_cached(mask, cache)
    shared = _share(cfg, mask, past, mode)

    def body(carry: tuple[jax.Array, Tree], inputs: tuple[Tree, jax.Array]) -> tuple[Tree, Tree]:
        x, kv = carry
        weights, number = inputs
        h = _normalise(cfg, x, weights, "attn_norm")
        q = rotary.rotate(projections.apply(h, from_bits(weights), "q", shared.factors), shared.cos, shared.sin)
        layer_cache = () if kv is None else _LayerCache(kv[0], kv[1], number)
        x, new_kv = _layer(cfg, shared, mode.constrain(x), weights, layer_cache)
        if kv is None:
            return (x, None), visit(Attended(q, *new_kv, shared.attend, x))
        k, v = (jax.lax.dynamic_index_in_dim(stack, number, 0, False) for stack in new_kv)
        return (x, new_kv), visit(Attended(q, k, v, shared.attend, x))

    numbers = jnp.arange(cfg.layers, dtype=jnp.int32)
    kv = None if cache is None else (cache.k, cache.v)
    (_, kv), results = jax.lax.scan(body, (x, kv), (params["layers"], numbers))
    if cache is not None:
        assert kv is not None, "a cache was given"
        cache = cache._replace(k=kv[0], v=kv[1], used=cache.used + x.shape[1])
    return results, cache


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalises in fp32, casts back, then multiplies: the order of transformers' LlamaRMSNorm."""
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape) * unit_rms(x, eps)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm over the last axis, all of it in fp32, cast back at the end."""
    wide, ends = x.astype(jnp.float32), (1,) * (x.ndim - 1) + weight.shape
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32).reshape(ends) + bias.astype(jnp.float32).reshape(ends)).astype(x.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """Divides by the root mean square of the last axis, in fp32, and casts back."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def weigh(x: jax.Array, share: jax.Array, eps: float) -> jax.Array:
    """Returns a layer's term of a mix in fp32, its states at unit RMS; saves only x, which the layer saves too."""
    return share.astype(jnp.float32) * unit_rms(x.astype(jnp.float32), eps)


def checkpoint_layer(layer: Callable, saves_products: bool, *, scanned: bool = True) -> Callable:
    """Returns the layer under remat, which saves its inputs for the backward pass, and the outputs of its matmuls too.

    Elementwise results are recomputed, as writing and reading them costs more, and so are attention's scores, the
    largest values. `scanned`: forward and backward are separate loops.
    """
    # Only inside one loop could XLA merge the recomputation with the first; the barrier against that prevents its
    # fusion with its consumers.
    return jax.checkpoint(layer, policy=_is_product if saves_products else None, prevent_cse=not scanned)


def _is_product(primitive: Any, *inputs: Any, **settings: Any) -> bool:
    """Remat policy: saves matmuls with weights, and int8 matmuls after their conversion to floats."""
    if jax.checkpoint_policies.save_only_these_names(PRODUCT)(primitive, *inputs, **settings):
        return True
    product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *inputs, **settings)
    return bool(product) and jnp.issubdtype(inputs[0].dtype, jnp.floating)


def _normalise(cfg: DecoderConfig, x: jax.Array, weights: Tree, name: str) -> jax.Array:
    if cfg.norm == "layer":
        return layer_norm(x, weights[name], weights[f"{name}_bias"], cfg.norm_eps)
    return rms_norm(x, weights[name], cfg.norm_eps)


class _Past(NamedTuple):
    """Keys that queries attend to [b s], their own included; the slot of the first query; real tokens so far."""

    keys: jax.Array
    first: jax.Array
    seen: jax.Array  # [b 1]
    used: jax.Array | None  # of a cache


def _find_past(mask: jax.Array, shared_prefix: SharedPrefix | None = None, kv_prefix: KVPrefix | None = None) -> _Past:
    """Returns the past of queries with this mask behind prefixes."""
    before = jnp.zeros((mask.shape[0], 0), bool) if shared_prefix is None else repeat(shared_prefix.mask, len(mask))
    if kv_prefix is not None:
        before = jnp.concatenate([before, kv_prefix.mask], axis=1)
    first, seen = jnp.full((), before.shape[1], jnp.int32), before.sum(axis=1, keepdims=True, dtype=jnp.int32)
    return _Past(jnp.concatenate([before, mask], axis=1), first, seen, None)


def _find_cached(mask: jax.Array, cache: Cache) -> tuple[_Past, Cache]:
    """Returns the past of queries with this mask, and the cache with their mask written."""
    seen = cache.valid.sum(axis=1, keepdims=True, dtype=jnp.int32)
    seen = seen if cache.packed is None else seen + cache.packed.length
    cache = cache._replace(valid=jax.lax.dynamic_update_slice_in_dim(cache.valid, mask, cache.used, axis=1))
    return _Past(cache.valid, cache.used, seen, cache.used), cache


def _share(
    cfg: DecoderConfig, mask: jax.Array, past: _Past, mode: Mode, segments: jax.Array | None = None
) -> "_Shared":
    attend = _attention_mask(past.keys, mask.shape[1], first=past.first, causal=mode.causal)
    if segments is None:
        positions = jnp.maximum(past.seen + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        keys = jnp.cumsum(past.keys, axis=1, dtype=jnp.int32) - 1
    else:
        assert mode.causal and past.used is None, "packed texts are read in one causal pass"
        before = past.keys.shape[1] - segments.shape[1]
        parts = jnp.pad(segments, ((0, 0), (before, 0)))[:, None, :]
        attend &= (parts == 0) | (parts == segments[:, :, None])
        positions = jnp.maximum(attend.sum(axis=2, dtype=jnp.int32) - 1, 0)
        keys = jnp.concatenate([jnp.cumsum(past.keys[:, :before], axis=1, dtype=jnp.int32) - 1, positions], axis=1)
    if cfg.window:
        behind = positions[:, :, None] - keys[:, None, :]
        attend &= (behind if mode.causal else jnp.abs(behind)) < cfg.window
    causal = mode.causal and past.used is None
    return _Shared(*angles(cfg, positions), attend[:, None], past.used, mode.factors, mode.saves_products, causal)


def angles(cfg: DecoderConfig, positions: Int[Array, "b t"]) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin [b t 1 r/2] at these positions."""
    return rotary.angles(positions, size=cfg.rotated or cfg.head_dim, theta=cfg.rope_theta, scaling=cfg.rope_scaling)


def rotate_keys(cfg: DecoderConfig, prefix: KVPrefix, *, seen: jax.Array | int) -> Float[Array, "l b m k e"]:
    """Returns a prefix' keys turned at its positions, `seen` real tokens before them."""
    cos, sin = prefix_angles(cfg, prefix.mask, seen=seen)
    return jax.vmap(lambda k: rotary.rotate(k, cos, sin))(prefix.k)


def prefix_angles(
    cfg: DecoderConfig, mask: Bool[Array, "b m"], *, seen: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin [b m 1 r/2] at a prefix' positions, `seen` real tokens before them."""
    return angles(cfg, jnp.maximum(seen + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0))


def check_positions(cfg: DecoderConfig, needed: int, *, what: str, remedy: str) -> None:
    """Refuses more positions than a model was trained on: beyond them it answers badly, and nothing else says so."""
    if needed > cfg.max_positions:
        raise UserError(f"{what} {needed:,} positions, the model was trained on {cfg.max_positions:,}; {remedy}")


def check_length(cfg: DecoderConfig, positions: int, *, packed: bool = False) -> None:
    """Refuses what a LongRope model may turn by its long frequencies: they go by the whole length of one text.

    Keys in parts cannot know it, and texts `packed` in a row have several.
    """
    scaling = cfg.rope_scaling
    if isinstance(scaling, rotary.LongRope) and positions > scaling.original_max_positions:
        key, what = "encoder.kind='cache' or adapter.kind='kv'", "keys and values of a message"
        remedy = "adapter.kind='embeddings'"
        if packed:
            key, what, remedy = "data.packed_tokens", "packed questions", "data.packed_tokens=0"
        raise UserError(
            f"config.{key}: {positions} positions, a LongRope reader with {what} has at most "
            f"{scaling.original_max_positions}; shorten the prompt or the text (config.data.context_tokens), or set "
            f"{remedy}"
        )


def _attention_mask(keys: Bool[Array, "b s"], length: int, *, first: jax.Array, causal: bool) -> Bool[Array, "b t s"]:
    """Returns the real keys of `length` queries; if causal, none later than the query: the first has slot `first`."""
    query_slot = first + jnp.arange(length, dtype=jnp.int32)
    key_slot = jnp.arange(keys.shape[1], dtype=jnp.int32)
    allowed = key_slot[None, :] <= query_slot[:, None] if causal else jnp.ones((length, keys.shape[1]), bool)
    return keys[:, None, :] & allowed[None, :, :]


class _LayerCache(NamedTuple):
    """The cache as one layer has it: of all layers [l b s k e], or its own alone, and its number in it."""

    k: jax.Array
    v: jax.Array
    number: jax.Array


class _Shared(NamedTuple):
    """Inputs that all layers share."""

    cos: jax.Array
    sin: jax.Array
    attend: jax.Array
    used: jax.Array | None
    factors: str | None  # see `Mode`
    saves: bool  # products, for the backward pass
    causal: bool  # the last keys are the queries' own, and none attends to those behind it


def _layer(  # noqa: PLR0913  (what stands before x is one of three)
    cfg: DecoderConfig,
    shared: _Shared,
    x: Float[Array, "b t d"],
    weights: Tree,
    kv: "_LayerCache | tuple[tuple[jax.Array, jax.Array], ...]",
    bias: Float[Array, "b s k"] | None = None,
    packed: PackedKeys | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One block, and its keys and values.

    A cache in `kv` comes back with the new tokens written. Without a cache it holds the pairs of what stands before x:
    of a shared prefix [1 o k e], which every row attends to, and of each row's own [b m k e].
    `bias` is that of all keys' scores; `packed` what every query sees beside the cache.
    """
    weights = from_bits(weights)  # in here, or a scan would stack its result for the backward pass
    linear = functools.partial(projections.apply, weights=weights, factors=shared.factors, saved=shared.saves)
    h = _normalise(cfg, x, weights, "attn_norm")
    # XLA merges matmuls of one input by concatenating their weights; at one token the concat costs as much as the
    # matmuls.
    inputs = (h, h, h) if shared.used is None else jax.lax.optimization_barrier((h, h, h))
    q = rotary.rotate(linear(inputs[0], name="q"), shared.cos, shared.sin)
    k = rotary.rotate(linear(inputs[1], name="k"), shared.cos, shared.sin)
    v = linear(inputs[2], name="v")
    new_kv = (k, v)
    if isinstance(kv, _LayerCache):
        assert shared.used is not None, "a cache knows its used slots"
        place, write = (kv.number, 0, shared.used, 0, 0), jax.lax.dynamic_update_slice
        new_kv = (write(kv.k, k[None], place), write(kv.v, v[None], place))
        k, v = (jax.lax.dynamic_index_in_dim(stack, kv.number, 0, False) for stack in new_kv)
    elif kv:
        k, v = (
            jnp.concatenate([*(repeat(array, len(x)) for array in before), new], axis=1)
            for *before, new in zip(*kv, new_kv, strict=True)
        )
    if packed is None:
        settings = {"factors": shared.factors, "causal": shared.causal}
        attended = attention(q, k, v, mask=shared.attend, bias=bias, **settings)
    else:
        attended = attention_behind(packed, q, k, v, mask=shared.attend, factors=shared.factors)
    # Only where its projection, or a pair beside it, is trained does the backward pass need it.
    x = x + linear(save(attended, shared.factors), name="o")
    h = _normalise(cfg, x, weights, "mlp_norm")
    gated = jax.nn.silu(linear(h, name="gate")) * linear(h, name="up")
    return x + linear(gated, name="down"), new_kv
