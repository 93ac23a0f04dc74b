"""Products of narrow factors that are summed and given in fp32."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns a product summed and given in fp32, whose gradient is taken in the factors' own precision.

    Left to itself the fp32 gradient of a bf16 product makes both products of the backward pass fp32 ones.
    """
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _wide_product(equation: str, left: jax.Array, right: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return wide_product(equation, left, right), (left, right)


def _narrow_gradients(equation: str, factors: tuple[jax.Array, jax.Array], gradient: jax.Array):
    product = functools.partial(jnp.einsum, equation)
    return jax.vjp(product, *factors)[1](gradient.astype(factors[0].dtype))


wide_product.defvjp(_wide_product, _narrow_gradients)
