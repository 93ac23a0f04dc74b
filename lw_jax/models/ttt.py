"""TTT-Linear and TTT-MLP language models (Sun et al. 2024): a layer's state is an inner model, trained by the text.

Parameters are a plain nested dict, layers stacked on a leading axis; matrices are [out, in], as the decoder's. Arrays
in, arrays out: no mesh, no files. Semantics follow the authors' PyTorch code, which the parity tests compare with. A
chunk is the K tokens whose gradients are all taken at the fast weights with which it began. Dimension letters here,
beside those of `core/types.py`: chunks n, tokens of a chunk i and j, hidden width of the inner model m.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from lw_jax.core.precision import FP32, Precision
from lw_jax.core.types import Tree
from lw_jax.models import rotary
from lw_jax.models.decoder import checkpoint_layer, head, layer_norm, rms_norm, unchanged
from lw_jax.models.products import narrow, product, wide_product
from lw_jax.models.ttt_inner import INNER_EPS, Chunk, Inner, Local, Text, read_by_chunk

GROWTH = 4  # hidden width of the inner MLP, in head widths


@dataclasses.dataclass(frozen=True)
class TTTConfig:
    """Architecture of a TTT model."""

    vocab: int
    width: int
    layers: int
    heads: int
    ffn: int
    inner: str = "linear"  # inner model: "linear" | "mlp"
    chunk: int = 16  # K
    base_rate: float = 1.0  # of the inner learning rate; 0.1 for "mlp"
    pre_conv: bool = False  # the three parts of the Mamba backbone: a convolution before each layer,
    share_qk: bool = False  # one product for queries and keys with a convolution for each,
    gate: bool = False  # and a gate behind the heads
    kernel: int = 4  # of the convolutions
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = True
    rows: int = 0  # of the embedding table; those beyond `vocab` fill a matmul's tiles and are no token (0: vocab)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Returns the inner model's output width after its first product."""
        return self.head_dim * (GROWTH if self.inner == "mlp" else 1)


@dataclasses.dataclass(frozen=True)
class Mode:
    """Execution options: they change memory and speed, and results only by rounding."""

    precision: Precision = FP32  # fast weights, norms, inner rates and gradients stay fp32
    form: str = "scan"  # over chunks, or "kernel": of a GPU
    unroll: int = 8  # chunks per scan iteration
    remat: str = "none"  # "none": no recomputation | "dots": all but products with matrices | "full": layers
    constrain: Callable[[jax.Array], jax.Array] = unchanged  # applied to the residual stream [b t d]
    local: Local = unchanged  # of the kernel: runs a function on each device's own rows
    measured: bool = False  # returns the inner losses; implies "scan"


class Memory(NamedTuple):
    """State of a layer: fast weights at the chunk's beginning, and sums of gradients since.

    `grads` are sums over the chunk's tokens of inner rate times gradient; `window` the last kernel - 1 inputs of the
    layer's own convolutions, `before` of the one in front of it. In a `Cache` each leaf has a leading layer axis.
    """

    weights: dict[str, jax.Array]  # w1 [b h e m], b1 [b h m]; "mlp": w2 [b h m e], b2 [b h e]
    grads: dict[str, jax.Array]
    window: Float[Array, "... b w d"] | None
    before: Float[Array, "... b w d"] | None


class Cache(NamedTuple):
    """States of all layers and the number of tokens read of each row."""

    memory: Memory
    seen: Int[Array, " b"]


class Output(NamedTuple):
    """Result of `forward`."""

    hidden: Float[Array, "b t d"]  # after the final norm
    losses: Float[Array, "l n b h c"] | None  # at each whole chunk's last token under W0, the weights before and after
    cache: Cache | None


def abstract(cfg: TTTConfig) -> Tree:
    n, d, h, e, m, f = cfg.layers, cfg.width, cfg.heads, cfg.head_dim, cfg.hidden, cfg.ffn
    layers: dict[str, tuple[int, ...]] = {
        **{name: (n, d) for name in ("seq_norm", "ffn_norm", "post_norm", "post_norm_bias")},
        **{name: (n, d, d) for name in ("q", "v", "o")},
        **{"gate": (n, f, d), "up": (n, f, d), "down": (n, d, f)},
        **{"rate": (n, h, d), "rate_bias": (n, h), "token": (n, cfg.chunk)},
        **{"inner_norm": (n, h, e), "inner_norm_bias": (n, h, e)},
        **{"w1": (n, h, e, m), "b1": (n, h, m)},
    }
    if cfg.inner == "mlp":
        layers |= {"w2": (n, h, m, e), "b2": (n, h, e)}
    convolved = (["before"] if cfg.pre_conv else []) + (["q", "k"] if cfg.share_qk else [])
    for name in convolved:
        layers |= {f"{name}_conv": (n, d, cfg.kernel), f"{name}_conv_bias": (n, d)}
    if cfg.pre_conv:
        layers["before_norm"] = (n, d)
    if not cfg.share_qk:
        layers["k"] = (n, d, d)
    if cfg.gate:
        layers["out_gate"] = (n, d, d)
    table = (cfg.rows or cfg.vocab, d)
    shapes = {"embed": table, "norm": (d,), "layers": layers} | ({} if cfg.tied else {"head": table})
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )


def init(key: jax.Array, cfg: TTTConfig) -> Tree:
    """Draws initial weights, fp32: normal of 0.02, unit norms, zero biases and token factors.

    Convolutions start uniform within 1 / sqrt(kernel), as PyTorch's; rows of the table that are no token at 0.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract(cfg))
    out = []
    for (path, leaf), leaf_key in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        name = str(path[-1].key)
        if name.endswith(("_conv", "_conv_bias")):
            bound = cfg.kernel**-0.5
            out.append(jax.random.uniform(leaf_key, leaf.shape, minval=-bound, maxval=bound))
        elif name.endswith("norm"):
            out.append(jnp.ones(leaf.shape))
        elif name.endswith("bias") or name in ("token", "b1", "b2"):
            out.append(jnp.zeros(leaf.shape))
        else:
            drawn = 0.02 * jax.random.normal(leaf_key, leaf.shape)
            out.append(drawn.at[cfg.vocab :].set(0.0) if name in ("embed", "head") else drawn)
    return jax.tree_util.tree_unflatten(treedef, out)


def fill_tables(cfg: TTTConfig, params: Tree) -> Tree:
    """Returns the parameters with `cfg.rows` in the tables, those that are no token at 0."""
    more = (cfg.rows or cfg.vocab) - cfg.vocab
    tables = {name: jnp.pad(params[name], ((0, more), (0, 0))) for name in ("embed", "head") if name in params}
    return {**params, **tables}


def logits(params: Tree, cfg: TTTConfig, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
    """Applies the head and returns fp32 logits of the real tokens."""
    table = head(params)[: cfg.vocab].astype(hidden.dtype)
    return jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)


def forward(  # noqa: PLR0913  (the one entry to the model)
    params: Tree,
    cfg: TTTConfig,
    ids: Int[Array, "b t"],
    *,
    rate: Float[Array, " b"] | None = None,
    memory: Memory | None = None,
    lengths: Int[Array, " b"] | None = None,
    mode: Mode = Mode(),
) -> Output:
    """Reads ids from their first token on, in the dual form.

    Args:
        params: the tree of `abstract`.
        cfg: the architecture.
        ids: any length; the padding of the last chunk is cut off again.
        rate: a multiple of each row's inner learning rate (None: 1).
        memory: state to continue from, after whole chunks (None: the learned initial state).
        lengths: the real tokens of each row, which come first; returns the cache after them.
        mode: execution options.
    """
    count = ids.shape[1]
    assert memory is None or not count % cfg.chunk, "a memory continues after whole chunks"
    ids = jnp.pad(ids, ((0, 0), (0, -count % cfg.chunk)))
    x = mode.constrain(jnp.take(params["embed"], ids, axis=0).astype(mode.precision.values))
    rate = jnp.ones(ids.shape[:1]) if rate is None else rate
    layer = functools.partial(_layer, cfg, mode, _Rows(rate, lengths))
    if mode.remat != "none":
        layer = checkpoint_layer(layer, mode.remat == "dots", scanned=cfg.layers > 1)

    def body(x: jax.Array, inputs: tuple[Tree, Memory | None]):
        x, outputs = layer(mode.constrain(x), *inputs)
        return x, outputs

    x, (losses, final) = jax.lax.scan(body, x, (params["layers"], memory))
    losses = None if losses is None else losses[:, : count // cfg.chunk]  # without the padding of the last chunk
    seen = jnp.full(ids.shape[:1], count, jnp.int32) if lengths is None else lengths
    return Output(_rms(x, params["norm"], cfg)[:, :count], losses, None if final is None else Cache(final, seen))


def beginning(params: Tree, cfg: TTTConfig, batch: int, dtype: jax.typing.DTypeLike) -> Memory:
    """Returns the memory before the first token: the learned fast weights, zeros for the convolutions."""
    weights = jax.vmap(lambda p: _beginning(p, cfg, batch))(params["layers"])
    window = jnp.zeros((cfg.layers, batch, cfg.kernel - 1, cfg.width), dtype)
    return Memory(
        weights,
        jax.tree.map(jnp.zeros_like, weights),
        window if cfg.share_qk else None,
        window if cfg.pre_conv else None,
    )


def decode(
    params: Tree, cfg: TTTConfig, ids: Int[Array, " b"], cache: Cache, *, mode: Mode = Mode()
) -> tuple[jax.Array, Cache]:
    """Reads one more token of each row, in the primal form; returns (hidden [b d], cache)."""
    x = jnp.take(params["embed"], ids, axis=0).astype(mode.precision.values)

    def body(x: jax.Array, inputs: tuple[Tree, Memory]):
        return _decode_layer(cfg, mode, cache.seen, x, *inputs)

    x, memory = jax.lax.scan(body, x, (params["layers"], cache.memory))
    return _rms(x, params["norm"], cfg), Cache(memory, cache.seen + 1)


# One layer over a whole text


class _Rows(NamedTuple):
    """Per-row arguments of `forward`."""

    rate: Float[Array, " b"]
    lengths: Int[Array, " b"] | None


def _layer(
    cfg: TTTConfig,
    mode: Mode,
    rows: _Rows,
    x: Float[Array, "b t d"],
    p: Tree,
    memory: Memory | None,
) -> tuple[jax.Array, tuple[jax.Array | None, Memory | None]]:
    """Returns the residual stream after the block, and the requested inner losses and memory."""
    p = narrow(p, mode.precision.factors)
    position = jnp.arange(x.shape[1], dtype=jnp.int32)[None] % cfg.chunk
    x, h, text, window, before = _prepare(cfg, mode, rows, position, x, p, memory)
    inner = Inner(p, mode.precision)
    weights = _beginning(p, cfg, x.shape[0]) if memory is None else memory.weights
    stateful = rows.lengths is not None or memory is not None
    losses = state = None
    if mode.form == "scan" or mode.measured or stateful:
        out, losses, state = read_by_chunk(
            inner, text, weights, lengths=rows.lengths, unroll=mode.unroll, measured=mode.measured
        )
    else:
        from lw_jax.models.ttt_kernel import read_by_kernel  # Pallas, which no other verb needs

        out = read_by_kernel(inner, text, weights, mode.local)
    x = x + _project_output(out.reshape(x.shape), h, p, cfg, mode)
    x = x + _feed_forward(x, p, cfg, mode)
    return x, (losses, Memory(*state, window, before) if stateful and state else None)


def _prepare(  # noqa: PLR0913
    cfg: TTTConfig,
    mode: Mode,
    rows: _Rows,
    position: Int[Array, "p t"],
    x: Float[Array, "b t d"],
    p: Tree,
    memory: Memory | None,
) -> tuple[jax.Array, jax.Array, Text, jax.Array | None, jax.Array | None]:
    """Returns the stream, its norm, the inner model's inputs, and both convolutions' last inputs."""
    before = window = None
    if cfg.pre_conv:
        h, past = _rms(x, p["before_norm"], cfg), memory and memory.before
        x, before = x + _convolve(h, p, "before", past), _keep_last(h, cfg, rows.lengths, past)
    h = _rms(x, p["seq_norm"], cfg)
    q = _linear(h, p, "q", mode)
    if cfg.share_qk:
        past = memory and memory.window
        window = _keep_last(q, cfg, rows.lengths, past)
        q, k = _convolve(q, p, "q", past), _convolve(q, p, "k", past)
    else:
        k = _linear(h, p, "k", mode)
    q, k = (_rotate(_heads(y, cfg), position, cfg) for y in (q, k))
    text = Text(q, k, _heads(_linear(h, p, "v", mode), cfg), _inner_rate(h, p, cfg, rows.rate))
    return x, h, text, window, before


def _beginning(p: Tree, cfg: TTTConfig, batch: int) -> dict[str, jax.Array]:
    names = ("w1", "b1", "w2", "b2") if cfg.inner == "mlp" else ("w1", "b1")
    return {name: jnp.broadcast_to(p[name].astype(jnp.float32), (batch, *p[name].shape)) for name in names}


# One layer over one more token


def _decode_layer(
    cfg: TTTConfig, mode: Mode, seen: Int[Array, " b"], x: Float[Array, "b d"], p: Tree, memory: Memory
) -> tuple[jax.Array, Memory]:
    p, place = narrow(p, mode.precision.factors), seen % cfg.chunk
    rows = _Rows(jnp.ones(seen.shape), None)
    x, h, text, window, before = _prepare(cfg, mode, rows, place[:, None], x[:, None], p, memory)
    q, k, v, rate = (jnp.swapaxes(leaf, 1, 2) for leaf in text)  # [b h 1 e], rate [b h 1]
    inner, target = Inner(p, mode.precision), v.astype(jnp.float32) - k.astype(jnp.float32)
    # As a chunk of one token whose query is ignored: its mixing is zero.
    nothing = jnp.zeros((*rate.shape, 1))
    _, steps = inner.read(memory.weights, Chunk(q, k, target, nothing, nothing))
    sums = jax.tree.map(jnp.add, memory.grads, inner.add_up(steps, rate))
    token = inner.token[place]
    now = jax.tree.map(lambda weight, total: weight - _widen_after(token, total) * total, memory.weights, sums)
    out = q.astype(jnp.float32) + inner.normalise(inner.answer(now, q))
    x = x + _project_output(jnp.swapaxes(out, 1, 2).reshape(x.shape), h, p, cfg, mode)
    x = x + _feed_forward(x, p, cfg, mode)
    ends = place == cfg.chunk - 1

    def choose(at_end: jax.Array, otherwise: jax.Array) -> jax.Array:
        return jnp.where(_widen_after(ends, at_end), at_end, otherwise)

    weights = jax.tree.map(choose, now, memory.weights)
    grads = jax.tree.map(lambda total: choose(jnp.zeros_like(total), total), sums)
    return x[:, 0], Memory(weights, grads, window, before)


# Parts


def _widen_after(x: Shaped[Array, " b"], like: jax.Array) -> jax.Array:
    return x.reshape(x.shape + (1,) * (like.ndim - 1))


def _rms(x: jax.Array, weight: jax.Array, cfg: TTTConfig) -> jax.Array:
    return rms_norm(x, weight.astype(x.dtype), cfg.norm_eps)


def _linear(x: Float[Array, "b t i"], p: Tree, name: str, mode: Mode) -> Float[Array, "b t o"]:
    return product("bti,oi->bto", x, p[name], saved=mode.remat != "full")


def _heads(x: Float[Array, "b t d"], cfg: TTTConfig) -> Float[Array, "b t h e"]:
    return x.reshape(*x.shape[:2], cfg.heads, cfg.head_dim)


def _inner_rate(h: Float[Array, "b t d"], p: Tree, cfg: TTTConfig, rate: Float[Array, " b"]) -> Float[Array, "b t h"]:
    gate = wide_product("btd,hd->bth", h, p["rate"])
    gate = jax.nn.sigmoid(gate + p["rate_bias"].astype(jnp.float32)[None, None])
    return cfg.base_rate / cfg.head_dim * gate * rate[:, None, None]


def _rotate(x: Float[Array, "b t h e"], position: Int[Array, "p t"], cfg: TTTConfig) -> Float[Array, "b t h e"]:
    """Rotates neighbouring pairs of values by the position in the chunk."""
    cos, sin = rotary.angles(position, size=cfg.head_dim, theta=cfg.rope_theta, scaling=None)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    left, right = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _convolve(x: Float[Array, "b t d"], p: Tree, name: str, past: jax.Array | None) -> Float[Array, "b t d"]:
    """Depthwise and causal; the last tap is the token's own."""
    taps, wide = p[f"{name}_conv"].astype(jnp.float32), _after(past, x, p[f"{name}_conv"].shape[1] - 1)
    length = x.shape[1]
    parts = (wide[:, i : i + length].astype(jnp.float32) * taps[None, None, :, i] for i in range(taps.shape[1]))
    return (sum(parts) + p[f"{name}_conv_bias"].astype(jnp.float32)[None, None]).astype(x.dtype)


def _keep_last(
    x: Float[Array, "b t d"], cfg: TTTConfig, lengths: jax.Array | None, past: jax.Array | None
) -> Float[Array, "b w d"]:
    """Returns the inputs that the next token's convolution needs, after `lengths` tokens of each row (None: all)."""
    size = cfg.kernel - 1
    wide = _after(past, x, size)
    if lengths is None:
        return wide[:, wide.shape[1] - size :]
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(wide, lengths)


def _after(past: jax.Array | None, x: Float[Array, "b t d"], size: int) -> jax.Array:
    past = jnp.zeros((x.shape[0], size, x.shape[2]), x.dtype) if past is None else past.astype(x.dtype)
    return jnp.concatenate([past, x], axis=1)


def _project_output(
    out: Float[Array, "b t d"], h: Float[Array, "b t d"], p: Tree, cfg: TTTConfig, mode: Mode
) -> jax.Array:
    """Returns the layer's output from its heads' outputs: norm, gate, output projection."""
    out = layer_norm(out, p["post_norm"], p["post_norm_bias"], INNER_EPS).astype(h.dtype)
    if cfg.gate:
        out = jax.nn.gelu(_linear(h, p, "out_gate", mode)) * out
    return _linear(out, p, "o", mode)


def _feed_forward(x: Float[Array, "b t d"], p: Tree, cfg: TTTConfig, mode: Mode) -> jax.Array:
    h = _rms(x, p["ffn_norm"], cfg)
    gated = jax.nn.silu(_linear(h, p, "gate", mode)) * _linear(h, p, "up", mode)
    return _linear(gated, p, "down", mode)
