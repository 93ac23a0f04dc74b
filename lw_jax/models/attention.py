"""Grouped-query attention: JAX's own, one of bf16 products for a CPU, and one behind keys of each head's own number."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.models.products import from_bits, multiply, saved_bits

LEAST = -1e30  # score of a masked key: finite, so that a row without keys has no NaN
BLOCK = 256  # least queries of a block of causal attention
BLOCKS = 8  # at most: each is a program part of its own


class PackedKeys(NamedTuple):
    """Keys, turned, and values that the heads of a layer have before a cache, one head's behind the other's."""

    k: Float[Array, "b m e"]
    v: Float[Array, "b m e"]
    bias: Float[Array, "b m"]  # of the scores; `LEAST` where a row has fewer
    head: Int[Array, " m"]  # of keys; -1: of none


def attention(  # noqa: PLR0913
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    *,
    mask: Bool[Array, "b 1 t s"],
    bias: Float[Array, "b s k"] | None = None,
    factors: str | None = None,
    causal: bool = False,
) -> Float[Array, "b t h e"]:
    """Grouped-query attention with fp32 softmax, scaled by the root of the head width.

    `bias` of each key's scores; `factors`: dtype of the factors of its products (None: that of q); `causal`: the mask
    hides from each query the last keys, those behind its own. Then long texts are computed in blocks of queries, none
    with the keys behind it: of 1,024 positions 5 of 8 scores.
    """
    length, keys = q.shape[1], k.shape[1]
    count = min(length // BLOCK, BLOCKS) if causal else 1
    if count < 2:
        return _attention(q, k, v, mask, bias, factors)
    blocks, ends = [], [length * block // count for block in range(count + 1)]
    for first, end in itertools.pairwise(ends):
        seen = keys - length + end
        block_bias = None if bias is None else bias[:, :seen]
        blocks.append(
            _attention(q[:, first:end], k[:, :seen], v[:, :seen], mask[:, :, first:end, :seen], block_bias, factors)
        )
    return jnp.concatenate(blocks, axis=1)


def _attention(  # noqa: PLR0913
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, bias: jax.Array | None, factors: str | None
) -> jax.Array:
    if factors is not None and q.dtype != jnp.dtype(factors):
        return jnp.asarray(_narrow(q, k, v, mask, None if bias is None else bias.astype(jnp.float32)))
    if bias is not None:
        bias = jnp.repeat(bias.swapaxes(1, 2)[:, :, None], q.shape[2] // k.shape[2], axis=1)
    # jax's own code promotes bf16 with fp32 in here, which the strict promotion of our tests would refuse.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, bias, mask)


def attention_behind(  # noqa: PLR0913
    packed: PackedKeys,
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    *,
    mask: Bool[Array, "b 1 t s"],
    factors: str | None = None,
) -> Float[Array, "b t h e"]:
    """`attention` with one softmax over `packed`, of which a query sees those of its head, and the keys k.

    The two are never joined in one array. All heads' scores of the packed keys are computed, so that one product serves
    heads of all lengths.
    """
    narrow, queries, scale = factors or q.dtype, _rows(q, k.shape[2]), q.shape[-1] ** -0.5
    rows, heads, count, width = queries.shape
    keys, values = (x.swapaxes(1, 2) for x in (k, v))
    seen = jnp.tile(mask, (1, 1, count // mask.shape[2], 1))
    behind = jnp.where(seen, scale * multiply("bkte,bkse->bkts", queries, keys, factors=narrow), LEAST)
    before = scale * multiply("bte,bse->bts", queries.reshape(rows, -1, width), packed.k, factors=narrow)
    before = (before + packed.bias.astype(jnp.float32)[:, None]).reshape(rows, heads, count, -1)
    before = jnp.where((packed.head[None] == jnp.arange(heads)[:, None])[None, :, None], before, LEAST)
    top = jnp.maximum(*(jnp.max(scores, axis=3, keepdims=True, initial=LEAST) for scores in (behind, before)))
    behind, before = jnp.exp(behind - top), jnp.exp(before - top)
    summed = jnp.sum(behind, axis=3, keepdims=True) + jnp.sum(before, axis=3, keepdims=True)
    out = multiply("bts,bse->bte", before.reshape(rows, heads * count, -1), packed.v, factors=narrow)
    out = out.reshape(queries.shape) + multiply("bkts,bkse->bkte", behind, values, factors=narrow)
    return _heads((out / summed).astype(q.dtype), q.shape[1])


# XLA's CPU products of bf16 factors take the last axis of both factors, or the last and the last but one; it transposes
# a factor of any other product, element by element, and multiplies in fp32. So the backward pass computes the scores
# again with keys as rows. The queries of a group are the rows of one product.


@jax.custom_vjp
def _narrow(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, bias: jax.Array | None) -> jax.Array:
    queries, keys, values = (_rows(x, k.shape[2]) for x in (_scaled(q), k, v))
    return _attend(queries, keys, values, mask, bias)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, bias: jax.Array | None):
    # Saved are the rotated and transposed rows: as fast to save as what `product` returned, and ready for use.
    saved = [saved_bits(_rows(x, k.shape[2])) for x in (_scaled(q), k, v)]
    queries, keys, values = from_bits(saved)
    return _attend(queries, keys, values, mask, bias), (saved, mask, bias)


def _attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, bias: jax.Array | None
) -> jax.Array:
    group = queries.shape[2] // mask.shape[2]
    scores = _product("bkte,bkse->bkts", queries, keys)
    if bias is not None:
        scores = scores + bias.swapaxes(1, 2)[:, :, None]
    scores = jnp.where(jnp.tile(mask, (1, 1, group, 1)), scores, LEAST)
    powers = jnp.exp(scores - jnp.max(scores, axis=3, keepdims=True))
    summed = jnp.sum(powers, axis=3, keepdims=True)
    return _heads(_product("bkts,bkse->bkte", powers, values) / summed, mask.shape[2])


def _backward(saved: tuple[list[jax.Array], jax.Array, jax.Array | None], gradient: jax.Array):
    (queries, keys, values), mask, bias = from_bits(saved[0]), *saved[1:]
    group, outputs = queries.shape[2] // mask.shape[2], _rows(gradient, queries.shape[1])
    scores = _product("bkse,bkte->bkst", keys, queries)
    if bias is not None:
        scores = scores + bias.swapaxes(1, 2)[..., None]
    scores = jnp.where(jnp.tile(mask.swapaxes(2, 3), (1, 1, 1, group)), scores, LEAST)
    powers = jnp.exp(scores - jnp.max(scores, axis=2, keepdims=True))
    shares = powers / jnp.sum(powers, axis=2, keepdims=True)
    of_shares = _product("bkse,bkte->bkst", values, outputs)
    of_scores = shares * (of_shares - jnp.sum(shares * of_shares, axis=2, keepdims=True))
    of_q = _product("bkts,bkse->bkte", of_scores.swapaxes(2, 3), keys)
    of_k, of_v = _product("bkst,bkte->bkse", of_scores, queries), _product("bkst,bkte->bkse", shares, outputs)
    length = mask.shape[2]
    of_bias = None if bias is None else of_scores.sum(axis=3).swapaxes(1, 2)
    return _scaled(_heads(of_q, length)), _heads(of_k, keys.shape[2]), _heads(of_v, keys.shape[2]), None, of_bias


_narrow.defvjp(_forward, _backward)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return multiply(equation, left, right, factors=jnp.bfloat16)


def _scaled(q: jax.Array) -> jax.Array:
    return q * q.shape[-1] ** -0.5


def _rows(x: Float[Array, "b t h e"], groups: int) -> Float[Array, "b k gt e"]:
    rows, length, _, width = x.shape
    split = x.reshape(rows, length, groups, -1, width)
    return split.transpose(0, 2, 3, 1, 4).reshape(rows, groups, -1, width)


def _heads(x: Float[Array, "b k gt e"], length: int) -> Float[Array, "b t h e"]:
    """Undoes `_rows` of so many positions."""
    rows, groups, _, width = x.shape
    split = x.reshape(rows, groups, -1, length, width)
    return split.transpose(0, 3, 1, 2, 4).reshape(rows, length, -1, width)
