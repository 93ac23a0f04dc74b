"""Loss terms of one teacher-forced pass.

Each term is a sum and a weight over tokens, so that the objective is one quotient and exact under accumulation.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lw_jax.core import config
from lw_jax.core.types import LossTerms
from lw_jax.losses import token_losses


@dataclasses.dataclass(frozen=True)
class Pass:
    """Logits of a reader's pass over one batch, and its inputs."""

    logits: jax.Array  # [b t v], of the answer's tokens
    fields: Mapping[str, Any]  # the reader's part of the batch
    teacher: jax.Array | None  # [b t v], of the text-prompted reader; None: `fields` hold its top tokens


def needs_teacher(loss: config.Loss, task: str) -> bool:
    """Returns whether a term compares with the text-prompted reader."""
    return bool(loss.kl) and task == "answer"


def total(loss: config.Loss, name: str, one: Pass) -> LossTerms:
    """Returns the weighted sum of the terms with a weight; the NLL of passages has weight 1."""
    task = one.fields["task"].name
    label = "" if task == "answer" else f"{task}/"
    targets, counted = one.fields["targets"], one.fields["weights"]
    found = {"nll": token_losses.nll(one.logits, targets, counted)}
    weights = {"nll": loss.ce if task == "answer" else 1.0, "kl": loss.kl}
    if needs_teacher(loss, task):
        found["kl"] = _kl(one)
    terms = {f"{label}{key}/{name}": pair for key, pair in found.items()}
    terms[f"{label}accuracy/{name}"] = token_losses.hits(one.logits, targets, counted)
    objective = sum((weights[key] * pair[0] for key, pair in found.items()), jnp.zeros(()))
    return LossTerms(objective, found["nll"][1], terms)


def _kl(one: Pass) -> token_losses.Pair:
    if one.teacher is not None:
        return token_losses.kl(one.teacher, one.logits, one.fields["weights"])
    top = one.fields["teacher"]
    return token_losses.kl_of_top(top["ids"], top["logp"], one.logits, one.fields["weights"])
