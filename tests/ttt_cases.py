"""Inputs of a TTT layer's inner model."""

import jax
import jax.numpy as jnp

from lw_jax.models.ttt_inner import Text

LENGTH, HEADS, SIZE, CHUNK = 48, 2, 32, 16


def draw_inner(rows: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array], Text, jax.Array]:
    """Returns a layer's parameters, fast weights, a text and what a loss multiplies the outputs with, all fp32."""
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def draw(*shape: int, around: float = 0.0, scale: float = 0.1) -> jax.Array:
        return around + scale * jax.random.normal(next(keys), shape)

    p = {
        "token": draw(CHUNK, scale=0.02),
        "inner_norm": draw(HEADS, SIZE, around=1.0),
        "inner_norm_bias": draw(HEADS, SIZE),
    }
    weights = {"w1": draw(rows, HEADS, SIZE, SIZE), "b1": draw(rows, HEADS, SIZE)}
    q, k, v, towards = (draw(rows, LENGTH, HEADS, SIZE, scale=1.0) for _ in range(4))
    return p, weights, Text(q, k, v, 0.1 * jnp.abs(draw(rows, LENGTH, HEADS, scale=1.0))), towards
