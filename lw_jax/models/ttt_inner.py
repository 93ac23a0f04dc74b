"""Inner model of a TTT layer, trained by the text, as a scan over chunks.

Notation as in `ttt.py`; this is the part after queries, keys and values. Arrays in, arrays out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lw_jax.core.precision import Precision
from lw_jax.core.types import Tree
from lw_jax.models.products import wide_product

INNER_EPS = 1e-6  # of the inner LayerNorm and of the one behind the heads, whatever the config's rms_norm_eps


Local = Callable[[Callable[..., Any]], Callable[..., Any]]  # makes a function run on each device's own rows


class Text(NamedTuple):
    """Inputs of the inner model: queries, keys and values [b t h e], inner rates [b t h] fp32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rate: jax.Array


class Chunk(NamedTuple):
    """One chunk of a text: [b h i e], `mixed` and `eta` [b h i j]; of a text, the chunks' axis before them."""

    q: jax.Array
    k: jax.Array
    target: jax.Array  # v - k, so that key plus inner output is to be the value
    mixed: jax.Array  # (q k^T + 1) eta, the 1 for the bias
    eta: jax.Array | None  # inner rate of token j as query i sees it; only an inner MLP uses it again


Steps = dict[str, tuple[jax.Array, jax.Array]]  # "1", "2": (inputs [b h i e], gradients [b h i m]) of an inner product


class Inner:
    """The inner model of one layer and its gradients."""

    def __init__(self, p: Tree, precision: Precision):
        """Reads a layer's parameters; an MLP where they have a second matrix. `precision` is of products."""
        self.precision, self.deep = precision, "w2" in p
        self.token = _token_factor(p)
        self.scale, self.offset = (
            p[name].astype(jnp.float32)[None, :, None] for name in ("inner_norm", "inner_norm_bias")
        )

    def product(self, equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
        """Returns an fp32 product of factors in the model's dtype."""
        return wide_product(equation, left.astype(self.precision.values), right.astype(self.precision.factors))

    def apply(self, weights: Tree, x: jax.Array, name: str) -> jax.Array:
        """Returns x w + b of one inner product, x [b h i e]."""
        return self.product("bhie,bhem->bhim", x, weights[f"w{name}"]) + weights[f"b{name}"][:, :, None]

    def normalise(self, z: jax.Array) -> jax.Array:
        """Applies the inner LayerNorm to [... b h i e]."""
        return normalise(z, _widen(self.scale, z), _widen(self.offset, z))

    def gradient(self, z: jax.Array, target: jax.Array) -> jax.Array:
        """Returns the gradient of 1/2 |LN(z) - target|^2 by z [b h i e]."""
        return pull_back(z, target, self.scale, self.offset)

    def read(self, weights: Tree, chunk: Chunk) -> tuple[jax.Array, Steps]:
        """Returns each query's output [b h i e] after the tokens up to its own, and the tokens' gradient steps."""
        size = chunk.q.shape[2]
        first = self.apply(weights, jnp.concatenate([chunk.q, chunk.k], axis=2), "1")
        z_query, z_key = first[:, :, :size], first[:, :, size:]
        if not self.deep:
            gradient = self.gradient(z_key, chunk.target)
            return z_query - self.product("bhij,bhje->bhie", chunk.mixed, gradient), {"1": (chunk.k, gradient)}
        x_key, pull = jax.vjp(jax.nn.gelu, z_key)
        second = self.gradient(self.apply(weights, x_key, "2"), chunk.target)
        (gradient,) = pull(self.product("bhie,bhme->bhim", second, weights["w2"]))
        x_query = jax.nn.gelu(z_query - self.product("bhij,bhjm->bhim", chunk.mixed, gradient))
        assert chunk.eta is not None, "an inner MLP mixes twice"
        again = (self.product("bhim,bhjm->bhij", x_query, x_key) + 1) * chunk.eta
        z = self.apply(weights, x_query, "2") - self.product("bhij,bhje->bhie", again, second)
        return z, {"1": (chunk.k, gradient), "2": (x_key, second)}

    def add_up(self, steps: Steps, rate: Float[Array, "b h i"]) -> dict[str, jax.Array]:
        """Returns the sums over a chunk's tokens of rate times gradient, by the names of the fast weights."""
        sums = {}
        for name, (inputs, gradient) in steps.items():
            weighted = rate[..., None] * gradient
            sums[f"w{name}"] = self.product("bhie,bhim->bhem", inputs, weighted)
            sums[f"b{name}"] = jnp.sum(weighted, axis=2)
        return sums

    def answer(self, weights: Tree, x: jax.Array) -> jax.Array:
        """Returns the inner model's output, before its norm, of [b h i e] under given weights."""
        first = self.apply(weights, x, "1")
        return self.apply(weights, jax.nn.gelu(first), "2") if self.deep else first

    def last_loss(self, weights: Tree, chunk: Chunk) -> jax.Array:
        """Returns the inner loss [b h] of a chunk's last token under given weights."""
        missed = self.normalise(self.answer(weights, chunk.k[:, :, -1:])) - chunk.target[:, :, -1:]
        return 0.5 * jnp.sum(missed**2, axis=(2, 3))


def read_by_chunk(
    inner: Inner,
    text: Text,
    weights: dict[str, jax.Array],
    *,
    lengths: jax.Array | None,
    unroll: int,
    measured: bool,
) -> tuple[jax.Array, jax.Array | None, tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
    """Returns outputs [b t h e], inner losses [n b h c] if measured, and (weights, gradients since) at the end.

    Only the computation that depends on the fast weights is inside the scan.
    """
    length, token = text.rate.shape[1], inner.token
    size = len(token)
    count = length // size
    q, k, v, rate = (_chunked(leaf, count) for leaf in text)  # [n b h i e], rate [n b h i]
    # Tokens of whole chunks update the next chunk's weights; those of a row's last, partial chunk go to the sums.
    applied, waiting = token[-1] * rate, jnp.zeros_like(rate)
    if lengths is not None:
        number = jnp.arange(count, dtype=jnp.int32)[:, None]
        whole = (number < lengths[None] // size).astype(jnp.float32)[:, :, None, None]
        position = jnp.arange(length, dtype=jnp.int32).reshape(count, 1, 1, size)
        real = (position < lengths[None, :, None, None]).astype(jnp.float32)
        applied, waiting = applied * whole, rate * (1 - whole) * real
    eta = jnp.tril(jnp.ones((size, size)) * token[:, None])[None, None, None] * rate[..., None, :]
    mixed = (inner.product("nbhie,nbhje->nbhij", q, k) + 1) * eta
    target = v.astype(jnp.float32) - k.astype(jnp.float32)
    chunks = Chunk(q, k, target, mixed, eta if inner.deep else None)
    learned = weights

    def body(carry: tuple[Tree, Tree], inputs: tuple[Chunk, jax.Array, jax.Array]):
        weights, sums = carry
        chunk, applies, waits = inputs
        z, steps = inner.read(weights, chunk)
        after = jax.tree.map(jnp.subtract, weights, inner.add_up(steps, applies))
        losses = None
        if measured:
            losses = jnp.stack([inner.last_loss(w, chunk) for w in (learned, weights, after)], axis=-1)
        if lengths is not None:
            sums = jax.tree.map(jnp.add, sums, inner.add_up(steps, waits))
        return (after, sums), (z, losses)

    nothing = jax.tree.map(jnp.zeros_like, weights)
    end, (z, losses) = jax.lax.scan(body, (weights, nothing), (chunks, applied, waiting), unroll=unroll)
    out = q.astype(jnp.float32) + inner.normalise(z)
    return _joined(out), losses, end


def normalise(z: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """Applies the inner LayerNorm over the last axis; scale and offset have z's axes."""
    return _standardise(z)[0] * scale + offset


def pull_back(z: jax.Array, target: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns the gradient of 1/2 |LN(z) - target|^2 by z."""
    unit, deviation = _standardise(z)
    d = (unit * scale + offset - target) * scale
    centred = d - jnp.mean(d, axis=-1, keepdims=True)
    return (centred - unit * jnp.mean(d * unit, axis=-1, keepdims=True)) / deviation


def _standardise(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (z - mean) / deviation over the last axis, and the deviation."""
    centred = z - jnp.mean(z, axis=-1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + INNER_EPS)
    return centred / deviation, deviation


def _widen(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)


def _chunked(x: jax.Array, count: int) -> jax.Array:
    """Returns [b t h ...] as [n b h i ...]."""
    x = x.reshape(x.shape[0], count, -1, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _joined(x: Float[Array, "n b h i e"]) -> Float[Array, "b t h e"]:
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _token_factor(p: Tree) -> Float[Array, " i"]:
    """Returns the factor of the summed gradients at each position of a chunk: near the mean of those so far."""
    learned = p["token"].astype(jnp.float32)
    return jnp.maximum(1.0 / jnp.arange(1, learned.shape[0] + 1, dtype=jnp.float32) + learned, 0.0)
