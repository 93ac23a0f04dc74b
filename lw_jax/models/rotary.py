"""Rotary position embedding (RoPE) and its frequency scaling for long contexts."""

import dataclasses
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_Values = TypeVar("_Values", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 ("llama3" rope type)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class LongRope:
    """Frequency scaling of Phi-3's long-context models ("longrope" rope type)."""

    short: tuple[float, ...]  # divisors of the frequencies in a text of up to `original_max_positions`
    long: tuple[float, ...]  # the same in a longer one
    original_max_positions: int
    gain: float  # of cos and sin


def angles(
    positions: Int[Array, "b t"], *, size: int, theta: float, scaling: Llama3Scaling | LongRope | None
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin [b t 1 r/2] in fp32 of the `size` = r rotated values of a head."""
    gain = 1.0
    exponent = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequency = 1.0 / jnp.power(jnp.float32(theta), exponent)
    frequency = frequency[None, :]
    if isinstance(scaling, Llama3Scaling):
        frequency = frequency * llama3_factors(frequency, scaling)
    elif isinstance(scaling, LongRope):
        # By a row's real tokens, as transformers chooses for a single row. Past the switch a cache of the short
        # frequencies is invalid: `decode.generate` processes the text again there, as transformers does.
        long = jnp.max(positions, axis=1, keepdims=True) >= scaling.original_max_positions
        divisors = (jnp.array(x, jnp.float32)[None, :] for x in (scaling.long, scaling.short))
        frequency = frequency / jnp.where(long, *divisors)
        gain = scaling.gain
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency[:, None, None, :]
    return jnp.cos(angle) * gain, jnp.sin(angle) * gain


def llama3_factors(frequency: _Values, scaling: Llama3Scaling) -> _Values:
    """Returns what Llama 3.1 multiplies each frequency by: long wavelengths' are divided, short ones' kept."""
    turns = scaling.original_max_positions * frequency / (2 * math.pi)  # over the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clip(0.0, 1.0)
    return (1.0 - smooth) / scaling.factor + smooth


def rotate(x: Float[Array, "b t h e"], cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first values of each head by `angles`; the others are unchanged."""
    rotated = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :rotated].astype(jnp.float32), 2, axis=-1)
    moved = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return moved if rotated == x.shape[-1] else jnp.concatenate([moved, x[..., rotated:]], axis=-1)
