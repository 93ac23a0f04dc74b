"""Matmuls of narrow factors that accumulate and return fp32."""

import functools

import jax
import jax.numpy as jnp


def wide_product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum accumulated and returned in fp32, its gradient computed in the factors' precision.

    Without this, the fp32 gradient of a bf16 product makes both matmuls of the backward pass fp32.
    """
    return jnp.asarray(_product(equation, left, right))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _forward(equation: str, left: jax.Array, right: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return wide_product(equation, left, right), (left, right)


def _backward(equation: str, factors: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    product = functools.partial(jnp.einsum, equation)
    return jax.vjp(product, *factors)[1](gradient.astype(factors[0].dtype))


_product.defvjp(_forward, _backward)
