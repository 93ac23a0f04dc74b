"""Array aliases and small value types.

Dimension letters, everywhere in annotations and einsums: batch b, source tokens s, latent slots m, latent width z,
target tokens t, model width d, heads h, kv heads k, head width e, ffn f, vocabulary v, layers l.
"""

import dataclasses
from typing import Any

import jax

Tree = Any  # nested dicts of arrays (or of ShapeDtypeStructs)


@dataclasses.dataclass(frozen=True)
class Example:
    """One question about one context; the first answer is the one trained on, all are references."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Task:
    """Task of a batch; part of its tree structure, so that each task compiles a program of its own."""

    name: str  # one of TASKS; of a language model "train" or "measure"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Frozen:
    """Encoder parts that the stage of a batch does not train; part of its tree structure, as `Task` is."""

    parts: tuple[str, ...]


TASKS = ("answer", "reconstruct", "continuation")  # the order of the task vectors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossTerms:
    """Loss and metrics as sums and weights, so that accumulation and resharding are exact.

    The objective is sum / weight over the whole global batch; `terms` maps a metric's name to its own (sum, weight).
    """

    sum: jax.Array
    weight: jax.Array
    terms: dict[str, tuple[jax.Array, jax.Array]]

    def __add__(self, other: "LossTerms") -> "LossTerms":
        """Returns the terms of both together; their metrics must have different names."""
        return LossTerms(self.sum + other.sum, self.weight + other.weight, self.terms | other.terms)


# Stands among readers' names for what serves all of them (the encoder); no reader can have it.
SHARED = ""

EXACT = 16  # bits per value of an unquantised channel
