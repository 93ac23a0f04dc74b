"""Grouped-query attention: JAX's own, or one of narrow products for a CPU."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lw_jax.models.products import multiply

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
        return jnp.asarray(_narrow(factors, q, k, v, mask))
    # jax's own code promotes bf16 with fp32 in here, which the strict promotion of our tests would refuse.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask)


# XLA's CPU products of bf16 factors take the last axis of both factors, or the last and the last but one; it transposes
# a factor of any other product, element by element, and multiplies in fp32. So the backward pass computes the scores
# again with keys as rows. The queries of a group are the rows of one product.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(factors: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    group, product = q.shape[2] // k.shape[2], functools.partial(multiply, factors=factors)
    scores = product("bkte,bkse->bkts", _rows(_scaled(q), k), _rows(k, k))
    scores = jnp.where(jnp.tile(mask, (1, 1, group, 1)), scores, _LEAST)
    powers = jnp.exp(scores - jnp.max(scores, axis=3, keepdims=True))
    summed = jnp.sum(powers, axis=3, keepdims=True)
    return _heads(product("bkts,bkse->bkte", powers, _rows(v, k)) / summed, q)


def _forward(factors: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array):
    return jnp.asarray(_narrow(factors, q, k, v, mask)), (q, k, v, mask)


def _backward(factors: str, inputs: tuple[jax.Array, ...], gradient: jax.Array):
    q, k, v, mask = inputs
    group, product = q.shape[2] // k.shape[2], functools.partial(multiply, factors=factors)
    queries, keys, values, outputs = (_rows(x, k) for x in (_scaled(q), k, v, gradient))
    scores = product("bkse,bkte->bkst", keys, queries)
    scores = jnp.where(jnp.tile(mask.swapaxes(2, 3), (1, 1, 1, group)), scores, _LEAST)
    powers = jnp.exp(scores - jnp.max(scores, axis=2, keepdims=True))
    shares = powers / jnp.sum(powers, axis=2, keepdims=True)
    of_shares = product("bkse,bkte->bkst", values, outputs)
    of_scores = shares * (of_shares - jnp.sum(shares * of_shares, axis=2, keepdims=True))
    of_q = product("bkts,bkse->bkte", of_scores.swapaxes(2, 3), keys)
    of_k, of_v = product("bkst,bkte->bkse", of_scores, queries), product("bkst,bkte->bkse", shares, outputs)
    return _scaled(_heads(of_q, q)), _heads(of_k, k), _heads(of_v, v), None


_narrow.defvjp(_forward, _backward)


def _scaled(q: jax.Array) -> jax.Array:
    return q * q.shape[-1] ** -0.5


def _rows(x: Float[Array, "b t h e"], k: jax.Array) -> Float[Array, "b k gt e"]:
    """Returns the heads of each group, one below the other."""
    rows, length, _, width = x.shape
    split = x.reshape(rows, length, k.shape[2], -1, width)
    return split.transpose(0, 2, 3, 1, 4).reshape(rows, k.shape[2], -1, width)


def _heads(x: Float[Array, "b k gt e"], like: Float[Array, "b t h e"]) -> Float[Array, "b t h e"]:
    """Undoes `_rows`."""
    rows, length, _, width = like.shape
    return x.reshape(rows, x.shape[1], -1, length, width).transpose(0, 3, 1, 2, 4).reshape(like.shape)
