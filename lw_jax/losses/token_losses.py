"""Token losses as fp32 sums and counts; targets are already aligned with the logits that predict them."""

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
    # A masked sum, not a gather: its gradient fuses into the same pass over the logits; a gather's is a scatter.
    is_target = jnp.arange(logits.shape[2], dtype=targets.dtype)[None, None] == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=2)
    return jax.nn.logsumexp(logits, axis=2) - chosen


def hits(logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"]) -> Pair:
    """Teacher-forced accuracy: summed weight of the targets that are the argmax, and the sum of weights."""
    right = jnp.argmax(logits, axis=2).astype(targets.dtype) == targets
    return jnp.sum(jnp.where(right, weights, 0.0)), jnp.sum(weights)


def kl(teacher: Float[Array, "b t v"], student: Float[Array, "b t v"], weights: Float[Array, "b t"]) -> Pair:
    """Summed KL(teacher || student) over answer positions."""
    return jnp.sum(token_kl(teacher, student) * weights), jnp.sum(weights)


def token_kl(teacher: Float[Array, "b t v"], student: Float[Array, "b t v"]) -> Float[Array, "b t"]:
    """KL(teacher || student) of each position in nats."""
    teacher = jax.nn.log_softmax(teacher.astype(jnp.float32), axis=2)
    student = jax.nn.log_softmax(student.astype(jnp.float32), axis=2)
    return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=2)


def kl_of_top(
    top_ids: Int[Array, "b t k"],
    top_logp: Float[Array, "b t k"],
    student: Float[Array, "b t v"],
    weights: Float[Array, "b t"],
) -> Pair:
    """`kl` from a teacher's k likeliest tokens and one bucket for all others: a lower bound, exact for k = v."""
    teacher = top_logp.astype(jnp.float32)
    student = jax.nn.log_softmax(student.astype(jnp.float32), axis=2)
    student = jnp.take_along_axis(student, top_ids, axis=2)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=2)
    rest_teacher, rest_student = _rest(teacher), _rest(student)
    divergence = divergence + jnp.exp(rest_teacher) * (rest_teacher - rest_student)
    return jnp.sum(divergence * weights), jnp.sum(weights)


def _rest(logp: Float[Array, "b t k"]) -> Float[Array, "b t"]:
    return jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(logp), axis=2), 1e-7))
