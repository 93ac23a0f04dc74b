"""The contract between the trainer and a recipe: a loss and tables, never a trainer's subclass.

The trainer owns accumulation, clipping, optimizer, donation, metrics, checkpoints, cadence and signals, and never asks
which recipe it runs. Everything that differs between recipes stands behind this protocol.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax

from lw_jax.core.types import LossTerms, Tree
from lw_jax.data.batches import Encoded
from lw_jax.data.examples import Split
from lw_jax.optim import Rates


@dataclasses.dataclass(frozen=True)
class Weights:
    """Two trees: gradients, optimizer state and checkpoints exist for the first only."""

    trainable: Tree
    frozen: Tree


class Recipe(Protocol):
    """What differs between training runs; made for one configuration and one mesh."""

    @property
    def rates(self) -> Rates:
        """Returns learning rate multiples over the trainable tree's paths."""
        ...

    def abstract(self) -> Weights:
        """Returns both trees as ShapeDtypeStructs, before any array exists."""
        ...

    def shardings(self) -> Weights:
        """Returns both trees as NamedShardings on the mesh."""
        ...

    def build(self) -> Weights:
        """Initialises the trainable tree and loads the frozen one, both already placed."""
        ...

    def data(self, split: Split, *, rows: Sequence[str] = ()) -> Encoded:
        """Returns the tokenised examples of "train" or "validation"; `rows` adds evaluation prompts."""
        ...

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Returns sums and weights over the batch; the objective is the quotient over the whole global batch."""
        ...

    def identity(self) -> dict[str, str]:
        """Returns what a checkpoint must agree with to be taken up: fingerprints of frozen weights and encoder."""
        ...
