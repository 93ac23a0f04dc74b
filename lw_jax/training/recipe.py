"""Recipe: the interface between the trainer and what it trains.

The trainer owns accumulation, clipping, optimizer, donation, metrics, checkpoints, cadence and signals. All differences
between recipes are behind this class.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import jax

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.types import LossTerms, Tree
from lw_jax.data.data_schedule import DataSchedule, Stream
from lw_jax.training.optimizers import Rates
from sharding import place
from sharding.placement import Placement


@dataclasses.dataclass(frozen=True)
class Weights:
    """Trainable and frozen parameters; gradients, optimizer state and checkpoints exist for the first only.

    The frozen ones are by reader; under `SHARED`, where there are any, those beside the trainable ones, on their mesh.
    """

    trainable: Tree
    frozen: Tree


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault of a configuration that is found before the run starts; an error refuses the run."""

    severity: Literal["error", "warning"]
    text: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


class Recipe:
    """Model, data and loss of a run, for one configuration and one placement.

    Of a run without steps the start is the result (encoder.kind "cache"). An `outline` has shapes and the loss; it
    loads nothing, and no model need be on this machine.
    """

    rates: Rates = ((".*", 1.0),)  # learning rate multipliers by path of the trainable tree
    decays_all = False  # weight decay reaches norms, biases, gains and embeddings too
    splits_computation = True  # over a model axis, as its readers' weights; False: estimates have a device do all of it
    has_branches = False  # the loss is `share` and a `branch` per reader, so that readers can be on other devices

    def __init__(self, cfg: Config, placed: Placement, *, outline: bool = False):
        self.cfg, self.placement, self.outline = cfg, placed, outline

    @functools.cached_property
    def shape_key(self) -> str:
        """Returns what shapes and the costs of one device follow from: recipes of other meshes share them."""
        kept = config.shape(self.cfg).items()
        return repr([item for item in kept if not item[0].startswith(("mesh.", "train."))])

    @property
    def unit(self) -> tuple[str, int]:
        """Returns the unit that the logs count and its number in an example: ("tokens", 512)."""
        return "samples", 1

    @functools.cached_property
    def abstract(self) -> Weights:
        """Both trees as ShapeDtypeStructs; traced once, as the planner asks some hundred times."""
        raise NotImplementedError

    @functools.cached_property
    def shardings(self) -> Weights:
        """Both trees as NamedShardings, each component on its mesh."""
        raise NotImplementedError

    def placed(self) -> Weights:
        """Returns both trees as ShapeDtypeStructs with their shardings."""
        shapes, shardings = self.abstract, self.shardings
        trainable = place.place_shapes(shapes.trainable, shardings.trainable)
        return Weights(trainable, place.place_shapes(shapes.frozen, shardings.frozen))

    def build(self, frozen: Tree | None = None) -> Weights:
        """Initialises the trainable tree and loads the frozen one unless given, both sharded."""
        raise NotImplementedError

    def load_frozen(self) -> Tree:
        """Loads the frozen tree, sharded: a resumed run needs it beside its checkpoint."""
        raise NotImplementedError

    def data_schedule(self) -> DataSchedule:
        """Returns the tokenised training examples and their order."""
        raise NotImplementedError

    def validation(self) -> Sequence[tuple[str, Stream]]:
        """Returns validation data sets with a prefix for their metrics; the loss of the first one ranks checkpoints.

        Called before the weights are loaded. Metrics below "detail/" go to the log files only.
        """
        raise NotImplementedError

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Returns sums and weights over the batch; the objective is the quotient over the whole global batch.

        `rng` is the key of the step, the same for every micro-batch and device. Random numbers are keyed by
        `batch["index"]`, so that they depend on neither.
        """
        raise NotImplementedError

    def share(self, trainable: Tree, source: Tree, rng: jax.Array, frozen: Tree = None) -> Tree:
        """Returns the shared activations [b ...], computed on the mesh of the trainable tree.

        `frozen` is what the frozen tree has under `SHARED`, on the same mesh; None where it has nothing.
        """
        raise NotImplementedError

    def part(self, name: str, trainable: Tree) -> Tree:
        """Returns the part of the trainable tree that the branch of a reader reads."""
        raise NotImplementedError

    def branch(self, name: str, part: Tree, frozen: Tree, fields: Tree, shared: Tree, rng: jax.Array) -> LossTerms:
        """Returns one reader's terms, from its own frozen weights and fields; the loss is the sum over readers."""
        raise NotImplementedError

    def findings(self) -> list[Finding]:
        """Returns errors and warnings of the configuration, with their remedies."""
        return []

    def collapse(self, step: int, values: Mapping[str, float]) -> str:
        """Returns the description of a collapse, with figures, by a step's validation metrics; or nothing."""
        del step, values
        return ""

    def identity(self) -> dict[str, str]:
        """Returns fingerprints of frozen weights and encoder, which a checkpoint must match to be read."""
        return {}

    def content(self) -> dict[str, str]:
        """Returns hashes of the "train" and "validation" data: a resumed run must find them unchanged.

        Reads both data sets.
        """
        return {}

    # --- planning, without files and devices: of a recipe made with `outline=True`

    def batch_widths(self) -> Tree:
        """Returns the shapes of one training example without the batch axis, at the configuration's limits."""
        raise NotImplementedError

    def validation_widths(self) -> Tree:
        """Returns the shapes of one held-out example, likewise."""
        raise NotImplementedError
