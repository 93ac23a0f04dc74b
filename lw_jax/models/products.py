"""Products of narrow factors that are summed and given in fp32."""

import functools

import jax
import jax.numpy as jnp


def wide_product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns a product summed and given in fp32, whose gradient is taken in the factors' own precision.

    Left to itself the fp32 gradient of a bf16 product makes both products of the backward pass fp32 ones.
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
