"""Recipe protocol: the interface between the trainer and a recipe.

The trainer owns accumulation, clipping, optimizer, donation, metrics, checkpoints, cadence and signals. All differences
between recipes are behind this protocol.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax

from lw_jax.core.types import LossTerms, Tree
from lw_jax.data.data_schedule import DataSchedule, Stream
from lw_jax.training.optimizers import Rates
from sharding.placement import Placement


@dataclasses.dataclass(frozen=True)
class Weights:
    """Trainable and frozen parameters; gradients, optimizer state and checkpoints exist for the first only.

    The frozen ones are by reader; under `SHARED`, where there are any, those beside the trainable ones, on their mesh.
    """

    trainable: Tree
    frozen: Tree


class Whole(Protocol):
    """What a run without a step needs: its start is its result."""

    @property
    def placement(self) -> Placement:
        """Returns the meshes of all components."""
        ...

    def abstract(self) -> Weights:
        """Returns both trees as ShapeDtypeStructs."""
        ...

    def shardings(self) -> Weights:
        """Returns both trees as NamedShardings, each component on its mesh."""
        ...

    def build(self, frozen: Tree | None = None) -> Weights:
        """Initialises the trainable tree and loads the frozen one unless given, both sharded."""
        ...

    def identity(self) -> dict[str, str]:
        """Returns fingerprints of frozen weights and encoder, which a checkpoint must match to be read."""
        ...

    def content(self) -> dict[str, str]:
        """Returns hashes of the "train" and "validation" data: a resumed run must find them unchanged.

        Reads both data sets.
        """
        ...


class Recipe(Whole, Protocol):
    """Model, data and loss of a training run, for one configuration and one placement."""

    @property
    def rates(self) -> Rates:
        """Returns learning rate multipliers by path of the trainable tree."""
        ...

    def load_frozen(self) -> Tree:
        """Loads the frozen tree, sharded: a resumed run needs it beside its checkpoint."""
        ...

    def data_schedule(self) -> DataSchedule:
        """Returns the tokenised training examples and their order."""
        ...

    def validation(self) -> Sequence[tuple[str, Stream]]:
        """Returns validation data sets with a prefix for their metrics; the loss of the first one ranks checkpoints.

        Called after the frozen weights are loaded. Metrics below "detail/" go to the log files only.
        """
        ...

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Returns sums and weights over the batch; the objective is the quotient over the whole global batch.

        `rng` is the key of the step, the same for every micro-batch and device. Random numbers are keyed by
        `batch["index"]`, so that they depend on neither.
        """
        ...


@runtime_checkable
class Counted(Recipe, Protocol):
    """A recipe with a unit that the logs count: tokens."""

    @property
    def unit(self) -> tuple[str, int]:
        """Returns the name of the unit and its number per example."""
        ...


def unit_of(recipe: Recipe) -> tuple[str, int]:
    """Returns the unit that the logs count and its number in an example: ("tokens", 512), else ("samples", 1)."""
    return recipe.unit if isinstance(recipe, Counted) else ("samples", 1)


@runtime_checkable
class Watched(Recipe, Protocol):
    """A recipe that detects a collapsed run by its validation metrics."""

    def collapse(self, step: int, values: Mapping[str, float]) -> str:
        """Returns the description of a collapse, with figures, or nothing."""
        ...


@runtime_checkable
class Branched(Recipe, Protocol):
    """A recipe whose loss is a shared part and a branch per reader, so that readers can be on other devices.

    The loss is the sum of the branches of the shared activations; a branch reads only its part of the trainable tree.
    """

    def share(self, trainable: Tree, source: Tree, rng: jax.Array, frozen: Tree = None) -> Tree:
        """Returns the shared activations [b ...], computed on the mesh of the trainable tree.

        `frozen` is what the frozen tree has under `SHARED`, on the same mesh; None where it has nothing.
        """
        ...

    def part(self, name: str, trainable: Tree) -> Tree:
        """Returns the part of the trainable tree that the branch of a reader reads."""
        ...

    def branch(self, name: str, part: Tree, frozen: Tree, fields: Tree, shared: Tree, rng: jax.Array) -> LossTerms:
        """Returns one reader's terms, from its own frozen weights and fields of the batch."""
        ...


@runtime_checkable
class Plannable(Recipe, Protocol):
    """A recipe that can be planned without its files and devices; made with `outline=True`."""

    def batch_widths(self) -> Tree:
        """Returns the shapes of one training example without the batch axis, at the configuration's limits."""
        ...

    def validation_widths(self) -> Tree:
        """Returns the shapes of one held-out example, likewise."""
        ...
