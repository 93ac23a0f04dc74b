"""Grouped-query attention: JAX's own, or one of bf16 products for a CPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lw_jax.models.products import from_bits, multiply, saved_bits

_LEAST = -1e30  # score of a masked key: finite, so that a row without keys has no NaN


def attention(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    *,
    mask: Bool[Array, "b 1 t s"],
    factors: str | None = None,
) -> Float[Array, "b t h e"]:
    """Grouped-query attention with fp32 softmax, scaled by the root of the head width.

    `factors`: dtype of the factors of its products (None: that of q).
    """
    if factors is not None and q.dtype != jnp.dtype(factors):
        return jnp.asarray(_narrow(q, k, v, mask))
    # jax's own code promotes bf16 with fp32 in here, which the strict promotion of our tests would refuse.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask)


# XLA's CPU products of bf16 factors take the last axis of both factors, or the last and the last but one; it transposes
# a factor of any other product, element by element, and multiplies in fp32. So the backward pass computes the scores
# again with keys as rows. The queries of a group are the rows of one product.


@jax.custom_vjp
def _narrow(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    queries, keys, values = (_rows(x, k.shape[2]) for x in (_scaled(q), k, v))
    return _attend(queries, keys, values, mask)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array):
    # Saved are the rotated and transposed rows: as fast to save as what `product` returned, and ready for use.
    saved = [saved_bits(_rows(x, k.shape[2])) for x in (_scaled(q), k, v)]
    queries, keys, values = from_bits(saved)
    return _attend(queries, keys, values, mask), (saved, mask)


def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    group = queries.shape[2] // mask.shape[2]
    scores = _product("bkte,bkse->bkts", queries, keys)
    scores = jnp.where(jnp.tile(mask, (1, 1, group, 1)), scores, _LEAST)
    powers = jnp.exp(scores - jnp.max(scores, axis=3, keepdims=True))
    summed = jnp.sum(powers, axis=3, keepdims=True)
    return _heads(_product("bkts,bkse->bkte", powers, values) / summed, mask.shape[2])


def _backward(saved: tuple[list[jax.Array], jax.Array], gradient: jax.Array):
    (queries, keys, values), mask = from_bits(saved[0]), saved[1]
    group, outputs = queries.shape[2] // mask.shape[2], _rows(gradient, queries.shape[1])
    scores = _product("bkse,bkte->bkst", keys, queries)
    scores = jnp.where(jnp.tile(mask.swapaxes(2, 3), (1, 1, 1, group)), scores, _LEAST)
    powers = jnp.exp(scores - jnp.max(scores, axis=2, keepdims=True))
    shares = powers / jnp.sum(powers, axis=2, keepdims=True)
    of_shares = _product("bkse,bkte->bkst", values, outputs)
    of_scores = shares * (of_shares - jnp.sum(shares * of_shares, axis=2, keepdims=True))
    of_q = _product("bkts,bkse->bkte", of_scores.swapaxes(2, 3), keys)
    of_k, of_v = _product("bkst,bkte->bkse", of_scores, queries), _product("bkst,bkte->bkse", shares, outputs)
    length = mask.shape[2]
    return _scaled(_heads(of_q, length)), _heads(of_k, keys.shape[2]), _heads(of_v, keys.shape[2]), None


_narrow.defvjp(_forward, _backward)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return multiply(equation, left, right, factors=jnp.bfloat16)


def _scaled(q: jax.Array) -> jax.Array:
    return q * q.shape[-1] ** -0.5


def _rows(x: Float[Array, "b t h e"], groups: int) -> Float[Array, "b k gt e"]:
    """Returns the heads of each group, one below the other."""
    rows, length, _, width = x.shape
    split = x.reshape(rows, length, groups, -1, width)
    return split.transpose(0, 2, 3, 1, 4).reshape(rows, groups, -1, width)


def _heads(x: Float[Array, "b k gt e"], length: int) -> Float[Array, "b t h e"]:
    """Undoes `_rows` of so many positions."""
    rows, groups, _, width = x.shape
    split = x.reshape(rows, groups, -1, length, width)
    return split.transpose(0, 3, 1, 2, 4).reshape(rows, length, -1, width)
