"""Pure token mathematics: sums and counts, in fp32. Targets come already aligned with the logits that predict them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Pair = tuple[jax.Array, jax.Array]  # sum, weight


def nll(logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"]) -> Pair:
    """Summed negative log-likelihood of the targets in nats, and the sum of weights."""
    return jnp.sum(token_nll(logits, targets) * weights), jnp.sum(weights)


def token_nll(logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """Negative log-likelihood of each target in nats."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[:, :, None], axis=2)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=2) - chosen


def hits(logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"]) -> Pair:
    """Teacher-forced accuracy: the weight of targets that are the argmax."""
    right = jnp.argmax(logits, axis=2).astype(targets.dtype) == targets
    return jnp.sum(jnp.where(right, weights, 0.0)), jnp.sum(weights)


def kl(
    teacher: Float[Array, "b t v"], student: Float[Array, "b t v"], weights: Float[Array, "b t"], *, temperature: float
) -> Pair:
    """Summed KL(teacher || student) over answer positions, times temperature squared (Hinton et al. 2015)."""
    teacher = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature, axis=2)
    student = jax.nn.log_softmax(student.astype(jnp.float32) / temperature, axis=2)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=2)
    return temperature**2 * jnp.sum(divergence * weights), jnp.sum(weights)
