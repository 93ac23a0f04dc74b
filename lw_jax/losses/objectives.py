"""What one teacher-forced pass of a reader is worth: every term of the objective from the same logits.

Each term is a sum and a weight over tokens. A term that belongs to an example (its first token, its slots) counts as
often as the example has tokens, so that the objective is one quotient and exact under accumulation.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lw_jax.core import config
from lw_jax.core.types import LossTerms
from lw_jax.losses import token_losses
from lw_jax.models import encoder


@dataclasses.dataclass(frozen=True)
class Pass:
    """A reader's pass over one batch, and what it was made from."""

    logits: jax.Array  # [b t v], of the answer's tokens
    fields: Mapping[str, Any]  # the reader's part of the batch
    latents: jax.Array  # [b m z]
    prefix: jax.Array  # [b m d]
    embedded: jax.Array | None  # [b t d], of the targets; where they are asked for
    teacher: jax.Array | None  # [b t v], of the text-prompted reader; where no likeliest tokens are kept


def needs_teacher(loss: config.Loss, task: str) -> bool:
    """Says whether a term compares with the text-prompted reader."""
    return bool(loss.kl) and task == "answer"


def needs_embedded(loss: config.Loss, task: str) -> bool:
    """Says whether a term needs the targets' embeddings: only a repeated text says what stood in which window."""
    return bool(loss.align) and task == "reconstruct"


def total(loss: config.Loss, name: str, one: Pass) -> LossTerms:
    """Returns the weighted sum of all terms with a weight; those of an answer do not apply to passages."""
    task = one.fields["task"].name
    label = "" if task == "answer" else f"{task}/"
    targets, counted = one.fields["targets"], one.fields["weights"]
    found = {"nll": token_losses.nll(one.logits, targets, counted)}
    weights = {"nll": loss.ce if task == "answer" else 1.0}
    if task == "answer":
        found |= _of_answers(loss, one)
        weights |= {"kl": loss.kl, "first": loss.first, "k": loss.k, "entropy": loss.entropy}
    used = encoder.slot_mask(one.fields["channel"][:, 0], one.latents.shape[1])
    tokens = counted.sum(axis=1)
    if one.embedded is not None:
        found["align"] = token_losses.misalignment(one.prefix, _windows(one, used.shape[1]), used, tokens)
        weights["align"] = loss.align
    if loss.diversity:
        found["diversity"] = token_losses.likeness(one.latents, used, tokens)
        weights["diversity"] = loss.diversity
    terms = {f"{label}{key}/{name}": pair for key, pair in found.items()}
    terms[f"{label}accuracy/{name}"] = token_losses.hits(one.logits, targets, counted)
    objective = sum((weights[key] * pair[0] for key, pair in found.items()), jnp.zeros(()))
    return LossTerms(objective, found["nll"][1], terms)


def _of_answers(loss: config.Loss, one: Pass) -> dict[str, token_losses.Pair]:
    targets, counted = one.fields["targets"], one.fields["weights"]
    found = {}
    if loss.kl and one.teacher is not None:
        found["kl"] = token_losses.kl(one.teacher, one.logits, counted, temperature=loss.temperature)
    elif loss.kl:
        kept = one.fields["teacher"]
        found["kl"] = token_losses.kl_of_top(
            kept["ids"], kept["logp"], one.logits, counted, temperature=loss.temperature
        )
    if loss.first:
        found["first"] = token_losses.nll(one.logits, targets, token_losses.first_tokens(counted, 1))
    if loss.k:
        found["k"] = token_losses.nll(one.logits, targets, token_losses.first_tokens(counted, loss.k_tokens))
    if loss.entropy:
        found["entropy"] = token_losses.negative_entropy(one.logits[:, 0], counted.sum(axis=1))
    return found


def _windows(one: Pass, slots: int) -> jax.Array:
    """Returns the mean embedding of the text in each slot's window [b m d]; EOS is no part of the text."""
    assert one.embedded is not None
    length = (one.fields["weights"] > 0).sum(axis=1, keepdims=True, dtype=jnp.int32) - 1
    text = jnp.arange(one.embedded.shape[1], dtype=jnp.int32)[None, :] < length
    weights = encoder.window_weights(text, slots, one.fields["channel"][:, 0])
    return jnp.einsum("bmt,btd->bmd", weights, one.embedded.astype(jnp.float32))
