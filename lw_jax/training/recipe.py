"""The contract between the trainer and a recipe: a loss and tables, never a trainer's subclass.

The trainer owns accumulation, clipping, optimizer, donation, metrics, checkpoints, cadence and signals, and never asks
which recipe it runs. Everything that differs between recipes stands behind this protocol.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax

from lw_jax.core.types import LossTerms, Tree
from lw_jax.data.data_schedule import Course, Stream
from lw_jax.models.pass_costs import Terms
from lw_jax.training.optimizers import Rates
from sharding.placement import Placement


@dataclasses.dataclass(frozen=True)
class Weights:
    """Two trees: gradients, optimizer state and checkpoints exist for the first only."""

    trainable: Tree
    frozen: Tree


class Recipe(Protocol):
    """What differs between training runs; made for one configuration and one placement."""

    @property
    def placement(self) -> Placement:
        """Returns where every component lies."""
        ...

    @property
    def rates(self) -> Rates:
        """Returns learning rate multiples over the trainable tree's paths."""
        ...

    def abstract(self) -> Weights:
        """Returns both trees as ShapeDtypeStructs, before any array exists."""
        ...

    def shardings(self) -> Weights:
        """Returns both trees as NamedShardings, each component on its own mesh."""
        ...

    def build(self, frozen: Tree | None = None) -> Weights:
        """Initialises the trainable tree and, unless it is given, loads the frozen one, both already placed."""
        ...

    def load_frozen(self) -> Tree:
        """Loads the frozen tree, already placed: what a resumed run needs beside its checkpoint."""
        ...

    def course(self) -> Course:
        """Returns the tokenised training examples and their order."""
        ...

    def validation(self) -> Sequence[tuple[str, Stream]]:
        """Returns held-out examples, each data set with a prefix for its metrics; the first one's loss is the best's.

        Asked for once the frozen weights are loaded. Metrics below "detail/" go to the run's files alone.
        """
        ...

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Returns sums and weights over the batch; the objective is the quotient over the whole global batch.

        `rng` is the step's, the same for every micro-batch and device: what is random is keyed by `batch["index"]`, so
        that neither of them changes a number.
        """
        ...

    def identity(self) -> dict[str, str]:
        """Returns what a checkpoint must agree with to be read: fingerprints of frozen weights and encoder."""
        ...

    def content(self) -> dict[str, str]:
        """Returns hashes of the "train" and "validation" data: a resumed run must find them unchanged.

        Reads both; a run's folder is read without them.
        """
        ...


@runtime_checkable
class Counted(Recipe, Protocol):
    """A recipe whose examples are worth so many of something that people count."""

    @property
    def unit(self) -> tuple[str, int]:
        """Returns its name and how many an example has."""
        ...


def unit_of(recipe: Recipe) -> tuple[str, int]:
    """Returns the unit that the logs count and its number in an example: ("tokens", 512), else ("samples", 1)."""
    return recipe.unit if isinstance(recipe, Counted) else ("samples", 1)


@runtime_checkable
class Watched(Recipe, Protocol):
    """A recipe that can tell from a validation that a run is worth nothing."""

    def collapse(self, step: int, values: Mapping[str, float]) -> str:
        """Returns what is wrong and by how much, or nothing."""
        ...


@runtime_checkable
class Branched(Recipe, Protocol):
    """A recipe whose loss is one shared part and a branch per reader, so that readers may lie on other devices.

    The loss is the sum of all branches over what `share` returns; a branch reads of the trainable tree only its part.
    """

    def share(self, trainable: Tree, source: Tree, rng: jax.Array) -> Tree:
        """Returns what every branch is given, its leading axis the batch; computed where the trainable tree lies."""
        ...

    def part(self, name: str, trainable: Tree) -> Tree:
        """Returns what the branch of a reader reads of the trainable tree."""
        ...

    def branch(self, name: str, part: Tree, frozen: Tree, fields: Tree, shared: Tree, rng: jax.Array) -> LossTerms:
        """Returns one reader's terms, from its own frozen weights and fields of the batch."""
        ...


@runtime_checkable
class Plannable(Recipe, Protocol):
    """A recipe that can be described where neither its files nor its devices are; made with `outline=True`."""

    def batch_widths(self) -> Tree:
        """Returns one training example as shapes without the batch axis, at the configuration's limits."""
        ...

    def terms(self, widths: Tree, rows: int) -> dict[str, Terms]:
        """Returns the arithmetic of one micro-batch: of what all share under "", of each reader under its name."""
        ...
