"""Text ids to latents [b m z]: a body (pretrained decoder or BERT, or bytes alone), pooling to M slots, projection."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.types import Tree
from lw_jax.models import codec, decoder
from lw_jax.models.attention import attention
from lw_jax.models.modules import Linear, RMSNorm
from lw_jax.models.products import product

BYTE_VOCABULARY = 257  # 256 bytes and the pad id
BYTE_HEADS = 8
BYTE_LAYERS = 6


class WindowPooling(nnx.Module):
    """Mean over contiguous windows of the real tokens; the best pooling in peers' ablations, and without weights."""

    def __init__(self, slots: int):
        self.slots = slots

    def __call__(
        self, x: Float[Array, "b s d"], mask: Bool[Array, "b s"], count: Int[Array, " b"]
    ) -> Float[Array, "b m d"]:
        """Pools into each row's `count` slots, zeros beyond; rows must be right-padded.

        A text shorter than that has windows of one token, some of them repeated.
        """
        return product("bms,bsd->bmd", window_weights(mask, self.slots, count).astype(x.dtype), x)


class RarePooling(nnx.Module):
    """States of the rarest tokens, a slot each, in the text's order.

    A reader's own keys and values of a fourth of a text's tokens serve it far better where they are those of the rarest
    tokens than where they are means over windows (docs/experiments.md).
    """

    def __init__(self, slots: int, vocab: int):
        self.slots = slots
        self.rarity = nnx.Param(jnp.zeros((vocab,)))  # of each token, in the training texts; counted, not learned

    def __call__(
        self, x: Float[Array, "b s d"], mask: Bool[Array, "b s"], count: Int[Array, " b"], ids: Int[Array, "b s"]
    ) -> Float[Array, "b m d"]:
        """Gathers each row's `count` rarest tokens; undefined beyond. Rows are right-padded."""
        places = rarest(self.rarity[...], ids, mask=mask, count=count, slots=self.slots)
        return jnp.take_along_axis(x, places[:, :, None], axis=1)


class QueryPooling(nnx.Module):
    """M learned queries cross-attend to the tokens, then a residual feed-forward: the original's pooler."""

    def __init__(self, slots: int, width: int, *, rngs: nnx.Rngs):
        self.queries = nnx.Param(jax.random.normal(rngs.params(), (slots, width)) * width**-0.5)
        self.attend = Attention(width, rngs=rngs)
        self.feed = FeedForward(width, 2 * width, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s d"], mask: Bool[Array, "b s"], count: Int[Array, " b"]
    ) -> Float[Array, "b m d"]:
        """Pools rows of any padding; queries are independent, so fewer slots are the first ones."""
        del count
        queries = jnp.broadcast_to(self.queries[...].astype(x.dtype)[None], (x.shape[0], *self.queries.shape))
        pooled = queries + self.attend(queries, x, mask)
        return pooled + self.feed(pooled)


class Attention(nnx.Module):
    """Multi-head attention of queries to a padded sequence."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.heads = next(heads for heads in range(BYTE_HEADS, 0, -1) if width % heads == 0)
        self.norm_q = RMSNorm(width)
        self.norm_kv = RMSNorm(width)
        self.q = Linear(width, width, rngs=rngs)
        self.k = Linear(width, width, use_bias=False, rngs=rngs)  # a bias would add the same to every key's score
        self.v = Linear(width, width, rngs=rngs)
        self.o = Linear(width, width, rngs=rngs)

    def __call__(self, queries: jax.Array, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns each query's [b m d] attention over the real tokens of x [b s d]."""

        def split(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], self.heads, -1)

        queries, x = self.norm_q(queries), self.norm_kv(x)
        mask = jnp.broadcast_to(mask[:, None, None, :], (x.shape[0], 1, queries.shape[1], x.shape[1]))
        q, k, v, factors = self.q(queries), self.k(x), self.v(x), self.q.kernel[...].dtype.name
        out = attention(split(q), split(k), split(v), mask=mask, factors=factors)
        return self.o(out.reshape(queries.shape))


class FeedForward(nnx.Module):
    """RMSNorm, linear, GELU, linear."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(width)
        self.up = Linear(width, hidden, rngs=rngs)
        self.down = Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the update, without the residual."""
        return self.down(jax.nn.gelu(self.up(self.norm(x))))


class ByteBody(nnx.Module):
    """The original's byte encoder: 256 embeddings, sinusoidal positions, transformer layers of the latents' width.

    Two deviations: padding is masked (the original attended to it), and the layers are pre-norm, which needs no
    warm-up of its own.
    """

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (BYTE_VOCABULARY, width)))
        self.layers = layers
        for index in range(layers):
            setattr(self, f"attend{index}", Attention(width, rngs=rngs))
            setattr(self, f"feed{index}", FeedForward(width, 4 * width, rngs=rngs))
        self.norm = RMSNorm(width)

    def __call__(
        self, ids: Int[Array, "b s"], mask: Bool[Array, "b s"], *, saves_products: bool
    ) -> Float[Array, "b s z"]:
        """Returns one normalised state per byte; states at padding are undefined."""
        x = jnp.take(self.embed[...], ids, axis=0)
        x = x + jnp.asarray(_sinusoids(*x.shape[1:]))[None].astype(x.dtype)
        for index in range(self.layers):
            layer = functools.partial(self._layer, index)
            x = decoder.checkpoint_layer(layer, saves_products, scanned=False)(x, mask)
        return self.norm(x)

    def _layer(self, index: int, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + getattr(self, f"attend{index}")(x, x, mask)
        return x + getattr(self, f"feed{index}")(x)


class Head(nnx.Module):
    """From a body's states to latents: layer mix (pretrained bodies), pooling, linear, RMSNorm without weight.

    The mix is a softmax over `states` of a pretrained body. With `taps` so many layers' states side by side take its
    place; each of their values has a shift and a scale.
    """

    def __init__(  # noqa: PLR0913
        self,
        body_width: int,
        width: int,
        *,
        slots: int,
        pooling: str,
        states: int,
        vocab: int,
        taps: int,
        rngs: nnx.Rngs,
    ):
        if taps:
            body_width = taps * body_width
            self.shift = nnx.Param(jnp.zeros((body_width,)))
            self.scale = nnx.Param(jnp.ones((body_width,)))
        elif states:
            self.mix = nnx.Param(jnp.zeros((states,)))
        if pooling == "windows":
            self.pool = WindowPooling(slots)
        elif pooling == "rare":
            self.pool = RarePooling(slots, vocab)
        else:
            self.pool = QueryPooling(slots, body_width, rngs=rngs)
        self.project = Linear(body_width, width, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s d"], mask: Bool[Array, "b s"], channel: Int[Array, "b 3"], ids: Int[Array, "b s"]
    ) -> Float[Array, "b m z"]:
        """Returns fp32 latents: each row's first slots and first width of them with unit RMS, zeros beyond.

        The layer mix is applied in the body's own pass.
        """
        slots, width = channel[:, 0], channel[:, 1]
        pooled = self.pool(x, mask, slots, ids) if isinstance(self.pool, RarePooling) else self.pool(x, mask, slots)
        if hasattr(self, "shift"):  # fp32: a few values of a body's states are far larger than the rest
            wide = pooled.astype(jnp.float32)
            pooled = ((wide - self.shift[...][None, None, :]) * self.scale[...][None, None, :]).astype(pooled.dtype)
        y = self.project(pooled).astype(jnp.float32)
        return codec.truncate(jnp.where(slot_mask(slots, y.shape[1])[:, :, None], y, 0.0), width)


def tapped_layers(count: int, layers: int) -> tuple[int, ...]:
    """Returns the numbers of `count` layers, evenly spaced, whose inputs an encoder takes."""
    return tuple((2 * i + 1) * layers // (2 * count) for i in range(count))


def keep_body(params: Tree) -> Tree:
    """Drops the head and the final norm of a decoder, which `read_lm` does not use."""
    return {name: leaf for name, leaf in params.items() if name not in ("head", "norm")}


def read_lm(  # noqa: PLR0913
    body: Tree,
    cfg: decoder.DecoderConfig,
    mix: Float[Array, " n"] | None,
    *,
    ids: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    mode: decoder.Mode,
    taps: int = 0,
) -> Float[Array, "b s d"]:
    """A decoder body's mixed states, or those before `taps` layers side by side, each of unit RMS.

    `body` is as `keep_body` leaves it, `mode` says whether the causal mask is on.
    """
    x = decoder.embed(body, ids)
    body = body | {"norm": jnp.ones((cfg.width,), x.dtype)}  # of `hidden`, which is not used here
    if taps:
        layers = tapped_layers(taps, cfg.layers)
        count = max(layers) + 1  # no layer behind the last of them is computed
        cfg = dataclasses.replace(cfg, layers=count)
        body = body | {"layers": jax.tree.map(lambda leaf: leaf[:count], body["layers"])}
        states = decoder.forward(body, cfg, x, mask=mask, taps=layers, mode=mode).states
        assert states is not None, "forward returns the requested states"
        return side_by_side(states, cfg)
    out = decoder.forward(body, cfg, x, mask=mask, mix=mix, mode=mode)
    assert out.mixed is not None, "forward returns the requested mix"
    return out.mixed


def side_by_side(states: Float[Array, "n b s d"], cfg: decoder.DecoderConfig) -> Float[Array, "b s nd"]:
    """Returns states of several layers one behind the other, each of unit RMS."""
    return jnp.concatenate(list(decoder.unit_rms(states, cfg.norm_eps)), axis=-1)


def slot_mask(slots: Int[Array, " b"], count: int) -> Bool[Array, "b m"]:
    """Returns the mask of the slots that each row uses, its first ones, of `count`."""
    return jnp.arange(count, dtype=jnp.int32)[None, :] < slots[:, None]


def rarest(
    rarity: Float[Array, " v"],
    ids: Int[Array, "b s"],
    *,
    mask: Bool[Array, "b s"],
    count: Int[Array, " b"],
    slots: int,
) -> Int[Array, "b m"]:
    """Returns the places of each row's `count` rarest real tokens in their order, then of its last one.

    Of two that are as rare the first is taken; a text with fewer tokens ends with its last one repeated.
    """
    length = mask.shape[1]
    score = jnp.where(mask, jnp.take(rarity, ids, axis=0), -jnp.inf)
    _, places = jax.lax.top_k(score, min(slots, length))
    places = jnp.pad(places, ((0, 0), (0, max(0, slots - length))), constant_values=length)
    tokens = mask.sum(axis=1, dtype=jnp.int32)[:, None]
    places = jnp.where(slot_mask(jnp.minimum(count, tokens[:, 0]), slots), places, length)
    return jnp.minimum(jnp.sort(places, axis=1), jnp.maximum(tokens - 1, 0))


def window_weights(mask: Bool[Array, "b s"], slots: int, count: Int[Array, " b"]) -> Float[Array, "b m s"]:
    """Rows that average each slot's window; slot j of L tokens spans floor(jL/M) to floor((j+1)L/M), at least one.

    M is each row's own `count`, at most `slots`; the windows beyond it are empty.
    """
    length, parts = mask.sum(axis=1, dtype=jnp.int32)[:, None], count[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    first = slot * length // parts
    last = jnp.maximum((slot + 1) * length // parts, first + 1)
    token = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, None, :]
    inside = (token >= first[:, :, None]) & (token < last[:, :, None]) & mask[:, None, :]
    inside &= slot_mask(count, slots)[:, :, None]
    weights = inside.astype(jnp.float32)
    return weights / jnp.maximum(weights.sum(axis=2, keepdims=True), 1.0)


def _sinusoids(length: int, width: int) -> np.ndarray:
    """Sinusoidal positions [s z] (Vaswani et al. 2017, 3.5), half sines and half cosines."""
    frequency = np.exp(-np.log(10000.0) * np.arange((width + 1) // 2) / max(1, (width + 1) // 2))
    angle = np.arange(length)[:, None] * frequency[None, :]
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, :width].astype(np.float32)
