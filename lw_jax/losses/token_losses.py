"""Pure token mathematics: sums and counts, in fp32. Targets come already aligned with the logits that predict them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Pair = tuple[jax.Array, jax.Array]  # sum, weight


def nll(logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"]) -> Pair:
    """Summed negative log-likelihood of the targets in nats, and the sum of weights."""
    return jnp.sum(token_nll(logits, targets) * weights), jnp.sum(weights)


def token_nll(logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """Negative log-likelihood of each target in nats."""
    logits = logits.astype(jnp.float32)
    # A masked sum, no gather: its gradient belongs to the same pass over the logits; a gather's is a scatter more.
    is_target = jnp.arange(logits.shape[2], dtype=targets.dtype)[None, None] == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=2)
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


def first_tokens(weights: Float[Array, "b t"], count: int) -> Float[Array, "b t"]:
    """Weights over each row's first `count` tokens that add up to the row's whole weight.

    So a loss over them is a mean over examples, each counted by its tokens, and sums stay exact under accumulation.
    """
    early = jnp.where(jnp.arange(weights.shape[1])[None, :] < count, weights, 0.0)
    return early * (weights.sum(axis=1) / jnp.maximum(early.sum(axis=1), 1e-9))[:, None]


def kl_of_top(
    top_ids: Int[Array, "b t k"],
    top_logp: Float[Array, "b t k"],
    student: Float[Array, "b t v"],
    weights: Float[Array, "b t"],
    *,
    temperature: float,
) -> Pair:
    """`kl` from a teacher's k likeliest tokens and one bucket for all others: a lower bound that is exact for k = v.

    `top_logp` are log-probabilities at the same temperature.
    """
    teacher = top_logp.astype(jnp.float32)
    student = jax.nn.log_softmax(student.astype(jnp.float32) / temperature, axis=2)
    student = jnp.take_along_axis(student, top_ids, axis=2)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=2)
    rest_teacher, rest_student = _rest(teacher), _rest(student)
    divergence = divergence + jnp.exp(rest_teacher) * (rest_teacher - rest_student)
    return temperature**2 * jnp.sum(divergence * weights), jnp.sum(weights)


def negative_entropy(logits: Float[Array, "b v"], weights: Float[Array, " b"]) -> Pair:
    """Summed minus entropy of each row's distribution, in nats."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=1)
    return jnp.sum(jnp.sum(jnp.exp(logp) * logp, axis=1) * weights), jnp.sum(weights)


def misalignment(
    prefix: Float[Array, "b m d"], target: Float[Array, "b m d"], used: Bool[Array, "b m"], weights: Float[Array, " b"]
) -> Pair:
    """Summed mean over a row's used slots of 1 - cosine to the target."""
    cosine = jnp.sum(_unit(prefix) * _unit(target), axis=2)
    share = used.astype(jnp.float32)
    mean = jnp.sum((1.0 - cosine) * share, axis=1) / jnp.maximum(share.sum(axis=1), 1.0)
    return jnp.sum(mean * weights), jnp.sum(weights)


def likeness(latents: Float[Array, "b m z"], used: Bool[Array, "b m"], weights: Float[Array, " b"]) -> Pair:
    """Summed mean squared cosine between different used slots of one row."""
    unit = _unit(latents)
    cosine = jnp.einsum("bmz,bnz->bmn", unit, unit)
    pairs = (used[:, :, None] & used[:, None, :] & ~jnp.eye(used.shape[1], dtype=bool)[None]).astype(jnp.float32)
    mean = jnp.sum(cosine**2 * pairs, axis=(1, 2)) / jnp.maximum(pairs.sum(axis=(1, 2)), 1.0)
    return jnp.sum(mean * weights), jnp.sum(weights)


def _rest(logp: Float[Array, "b t k"]) -> Float[Array, "b t"]:
    """Returns the log-probability of all tokens that are not among these."""
    return jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(logp), axis=2), 1e-7))


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    # Below the root, or the gradient of a slot that is not sent, which is 0, would be no number.
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-12))
