"""Products of a model's matrices: the one place that decides in which precision they are computed.

The factors' dtypes say it (`core.precision`). Two factors of one dtype are multiplied as they are. Where the values are
fp32 and the weights bf16, which is how a CPU computes in bf16, the values are rounded to bf16 for the product, which
sums in fp32; so do both products of the backward pass. XLA's CPU products of bf16 factors are fast only with fp32
results (docs/numbers.md). The result is rounded once, so that the backward pass finds it as bf16.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lw_jax.core.precision import Precision
from lw_jax.core.types import Tree

BITS = "uint16"  # see `stack_dtype`
PRODUCT = "product"  # checkpoint name of what a policy of `jax.checkpoint` saves and does not see as a product
# Leaves of a layer that are only ever factors of products: the matrices of a decoder, of BERT and of a TTT model.
MATRICES = frozenset(("q", "k", "v", "o", "gate", "up", "down", "out_gate", "rate"))


def product(equation: str, x: jax.Array, weights: jax.Array, *, saved: bool = False) -> jax.Array:
    """Returns an einsum of values and weights in the dtype of the values; of two dtypes it is rounded to bf16.

    `saved`: the backward pass of a scan over layers finds it in a stack.
    """
    if x.dtype == weights.dtype:
        y = jnp.einsum(equation, x, weights)
        return _save_behind_barrier(y) if saved else y
    return _save_bits(_by_matrix(equation, x, weights))


def wide_product(equation: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns an einsum in fp32, its gradients computed in the factors' precision.

    Without this, the fp32 gradient of a bf16 product makes both matmuls of the backward pass fp32.
    """
    return jnp.asarray(_product(equation, jnp.dtype(jnp.float32), x, weights))


def save(x: jax.Array, factors: str | None) -> jax.Array:
    """Returns x, which a policy of `jax.checkpoint` saves; of bf16 factors in fp32 values its bits, rounded."""
    if factors is None or x.dtype == jnp.dtype(factors):
        return checkpoint_name(x, PRODUCT)
    return _save_bits(x)


@jax.custom_jvp
def _save_behind_barrier(x: jax.Array) -> jax.Array:
    """Returns a product, which a policy of `jax.checkpoint` saves behind a barrier.

    XLA for GPUs (of JAX 0.11) multiplies into a scan's stack, and once more where the layer itself takes the product.
    """
    return x


@_save_behind_barrier.defjvp
def _save_behind_barrier_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return checkpoint_name(jax.lax.optimization_barrier(primals[0]), PRODUCT), tangents[0]


@jax.custom_jvp
def _save_bits(x: jax.Array) -> jax.Array:
    """Returns fp32 rounded to bf16, of which a policy of `jax.checkpoint` saves the bits: half the memory traffic."""
    return from_bits(saved_bits(x)).astype(x.dtype)


@_save_bits.defjvp
def _save_bits_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _save_bits.fun(*primals), tangents[0]


def saved_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of an array in bf16, which a policy of `jax.checkpoint` saves; why bits: `stack_dtype`."""
    return checkpoint_name(as_bits(x.astype(jnp.bfloat16)), PRODUCT)


def _by_matrix(equation: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the product with weights of heads [h e d] or [d h e] taken as a matrix.

    XLA orders the axes of a product with two axes on a side its own way, and transposes weights and values for it.
    """
    left, right = equation.split("->")[0].split(",")
    shared = [axis for axis in right if axis in left]  # summed over
    if weights.ndim == 2 or left[-len(shared) :] != right[-len(shared) :]:
        return jnp.asarray(_product(equation, x.dtype, x, weights))
    out_shape = weights.shape[: -len(shared)]
    rows = x.reshape(*x.shape[:2], -1)
    y = _product("btk,nk->btn", x.dtype, rows, weights.reshape(math.prod(out_shape), rows.shape[2]))
    return jnp.asarray(y).reshape(*x.shape[:2], *out_shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, dtype: jnp.dtype, x: jax.Array, weights: jax.Array) -> jax.Array:
    return _compute(equation, dtype, x, weights)


def _compute(equation: str, dtype: jnp.dtype, x: jax.Array, weights: jax.Array) -> jax.Array:
    run = functools.partial(multiply, factors=_narrowest(x, weights), dtype=dtype)
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    rows = [axis for axis in left if axis not in right]
    count = math.prod(x.shape[left.index(axis)] for axis in rows)
    if x.dtype == weights.dtype or not rows or count > 1:
        return run(equation, x, weights)
    # A CPU multiplies one row of bf16 without its matrix instructions, ten times slower than two rows.
    two = jnp.concatenate([x, x], axis=left.index(rows[0]))
    return jax.lax.slice_in_dim(run(equation, two, weights), 0, 1, axis=out.index(rows[0]))


def _forward(
    equation: str, dtype: jnp.dtype, x: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _compute(equation, dtype, x, weights), (x, weights)  # not by itself, which a Pallas kernel cannot hold


def _backward(
    equation: str, dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del dtype
    x, weights = saved
    # Sums in the dtype of the values: fp32 on a CPU. The weights' gradient is rounded once, to the weights' dtype.
    run = functools.partial(multiply, factors=_narrowest(x, weights), dtype=x.dtype)
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    of_weights = run(f"{out},{left}->{right}", gradient, x)
    return run(f"{out},{right}->{left}", gradient, weights), of_weights.astype(weights.dtype)


_product.defvjp(_forward, _backward)


def multiply(equation: str, left: jax.Array, right: jax.Array, *, factors: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Returns an einsum of two arrays cast to the dtype `factors`, summed and returned in `dtype`."""
    return jnp.einsum(equation, left.astype(factors), right.astype(factors), preferred_element_type=dtype)


def _narrowest(x: jax.Array, weights: jax.Array) -> jnp.dtype:
    return min(x.dtype, weights.dtype, key=lambda dtype: dtype.itemsize)


def cast(tree: Tree, precision: Precision) -> Tree:
    """Returns trainable parameters for a pass: nnx kernels in the precision of the factors, all else in the values'.

    On a CPU the stacked matrices of a body stay fp32: their layers narrow their own, since XLA's CPU backend cuts and
    stacks bf16 by way of fp32.
    """

    def convert(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf.astype(precision.factors if path[-1].key == "kernel" else precision.values)

    return jax.tree_util.tree_map_with_path(convert, tree)


def narrow(layer: Tree, factors: str) -> Tree:
    """Returns a layer's trainable parameters with its matrices in the dtype of the factors."""
    return {name: leaf.astype(factors) if name in MATRICES else leaf for name, leaf in layer.items()}


def stack_dtype(factors: jnp.dtype, values: jnp.dtype) -> jnp.dtype:
    """Returns the dtype in which frozen matrices are stacked: for bf16 on a CPU uint16, the same bits.

    XLA's CPU backend cuts a stack of bf16 by way of fp32: it would convert the whole stack before a scan and each layer
    back in it.
    """
    return jnp.dtype(BITS) if factors.itemsize < values.itemsize else factors


def as_bits(x: jax.Array) -> jax.Array:
    """Returns bf16 as the bits in which a stack holds it."""
    return jax.lax.bitcast_convert_type(x, BITS)


def from_bits(layer: Tree) -> Tree:
    """Returns a tree with floats in place of the bits of a stack; unchanged where it has none."""

    def convert(leaf: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(leaf, jnp.bfloat16) if leaf.dtype == BITS else leaf

    return jax.tree.map(convert, layer)
