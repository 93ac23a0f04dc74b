"""Loss terms of one teacher-forced pass.

Each term is a sum and a weight over tokens, so that the objective is one quotient and exact under accumulation.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from lw_jax.core import config
from lw_jax.core.types import LossTerms
from lw_jax.losses import token_losses


def needs_teacher(loss: config.Loss, task: str) -> bool:
    """Returns whether a term compares with the text-prompted reader."""
    return bool(loss.kl) and task == "answer"


def total(
    loss: config.Loss,
    name: str,
    logits: Float[Array, "b t v"],
    fields: Mapping[str, Any],
    teacher: Float[Array, "b t v"] | None,
) -> LossTerms:
    """Returns the weighted sum of the terms with a weight; the NLL of passages has weight 1.

    `fields` are the part of the batch of the reader `name`; without the logits of the text-prompted reader, `teacher`,
    they hold its top tokens.
    """
    task = fields["task"].name
    label = "" if task == "answer" else f"{task}/"
    targets, counted = fields["targets"], fields["weights"]
    sums = {"nll": token_losses.nll(logits, targets, counted)}
    weights = {"nll": loss.ce if task == "answer" else 1.0, "kl": loss.kl}
    if needs_teacher(loss, task):
        if teacher is not None:
            sums["kl"] = token_losses.kl(teacher, logits, counted)
        else:
            top = fields["teacher"]
            sums["kl"] = token_losses.kl_of_top(top["ids"], top["logp"], logits, counted)
    terms = {f"{label}{key}/{name}": pair for key, pair in sums.items()}
    terms[f"{label}accuracy/{name}"] = token_losses.hits(logits, targets, counted)
    objective = sum((weights[key] * pair[0] for key, pair in sums.items()), jnp.zeros(()))
    return LossTerms(objective, sums["nll"][1], terms)
