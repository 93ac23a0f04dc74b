"""Rotary position embedding (RoPE) and its frequency scaling for long contexts."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
        frequency = _llama3_frequencies(frequency, scaling)
    elif isinstance(scaling, LongRope):
        # By a row's real tokens, as transformers chooses for a single row. Past the switch a cache of the short
        # frequencies is invalid: `decode.generate` processes the text again there, as transformers does.
        long = jnp.max(positions, axis=1, keepdims=True) >= scaling.original_max_positions
        divisors = (jnp.array(x, jnp.float32)[None, :] for x in (scaling.long, scaling.short))
        frequency = frequency / jnp.where(long, *divisors)
        gain = scaling.gain
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency[:, None, None, :]
    return jnp.cos(angle) * gain, jnp.sin(angle) * gain


def _llama3_frequencies(frequency: jax.Array, scaling: Llama3Scaling) -> jax.Array:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    wavelength = 2 * jnp.pi / frequency
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    return jnp.where(
        wavelength > longest, frequency / scaling.factor, jnp.where(wavelength < shortest, frequency, between)
    )


def rotate(x: Float[Array, "b t h e"], cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first values of each head by `angles`; the others are unchanged."""
    rotated = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :rotated].astype(jnp.float32), 2, axis=-1)
    moved = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return moved if rotated == x.shape[-1] else jnp.concatenate([moved, x[..., rotated:]], axis=-1)
