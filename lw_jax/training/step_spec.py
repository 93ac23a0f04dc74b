"""Optimizer, train step and abstract arrays (shapes with shardings) of a run; the planner compiles it elsewhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.types import SHARED, Tree
from lw_jax.data.batches import Batch, fill
from lw_jax.training import optimizers, train_step
from lw_jax.training.recipe import Recipe
from lw_jax.training.train_step import State
from sharding import place
from sharding.place import Cut


class StepSpec:
    """Optimizer and train step of a recipe, and their arguments as ShapeDtypeStructs with shardings."""

    def __init__(self, cfg: Config, recipe: Recipe):
        self.cfg, self.recipe, self.placement = cfg, recipe, recipe.placement
        self.phases = [optimizers.Phase(steps, stage.rate) for _, stage, steps in config.stages(cfg)]
        self.optimizer = optimizers.make(
            cfg.optim,
            phases=self.phases,
            rates=recipe.rates,
            abstract=recipe.abstract.trainable,
            decays_all=recipe.decays_all,
        )
        self.step = train_step.make(recipe, self.placement, self.optimizer, seed=cfg.seed)

    def accumulation(self, micro_batch: int) -> int:
        """Returns the micro-batches of a step; `micro_batch` is the most rows on one device at once, 0: all at once.

        Raises sharding.errors.PlacementError where some device would have no example.
        """
        batch, data = self.cfg.train.global_batch, self.placement.data
        return place.cut(global_batch=batch, micro_batch=micro_batch, data_axis=data).accumulation

    def cut(self, accumulation: int) -> Cut:
        return Cut(self.cfg.train.global_batch, self.placement.data, accumulation)

    def put(self, batch: Batch, accumulation: int) -> Tree:
        """Returns this process's share of a global batch [b ...] on the devices, as [a B/a ...], filled up."""
        rows = self.cut(accumulation).rows // place.processes(self.placement.learner)
        put = functools.partial(place.put_batch, accumulation=accumulation)
        return place.put_parts(fill(batch, rows), self.placement, put)

    def frozen_bytes(self) -> dict[Mesh, int]:
        """Returns the bytes of frozen weights on one device of each mesh."""
        sizes = dict.fromkeys(self.placement.meshes, 0)
        for name, part in self.frozen.items():
            mesh = self.placement.learner if name == SHARED else self.placement.readers[name].mesh
            sizes[mesh] += place.device_bytes(part)
        return sizes

    @functools.cached_property
    def state(self) -> State:
        trainable, replicated = self.recipe.placed().trainable, place.whole(self.placement.learner)

        def is_masked(moment: Any) -> bool:
            return isinstance(moment, optax.MaskedNode)

        opt_state = optax.tree_map_params(
            self.optimizer,
            lambda moment, weight: moment if is_masked(moment) else moment.update(sharding=weight.sharding),
            jax.eval_shape(self.optimizer.init, trainable),
            trainable,
            transform_non_params=lambda count: count.update(sharding=replicated),
            is_leaf=is_masked,
        )
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        return {"trainable": trainable, "opt_state": opt_state, "step": step}

    @functools.cached_property
    def frozen(self) -> Tree:
        return self.recipe.placed().frozen

    def batch(self, widths: Tree, accumulation: int) -> Tree:
        """Returns an abstract global batch [a b ...]; `widths` is one example's shapes, without the batch axis."""
        return self.examples(widths, accumulation, self.cut(accumulation).rows // accumulation)

    def examples(self, widths: Tree, *axes: int) -> Tree:
        """Returns abstract examples [*axes ...] where they are read, split over data along the last of these axes."""

        def put(tree: Tree, mesh: Mesh) -> Tree:
            sharding = NamedSharding(mesh, P(*[None] * (len(axes) - 1), "data"))
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((*axes, *leaf.shape), leaf.dtype, sharding=sharding), tree
            )

        return place.put_parts(widths, self.placement, put)

    def lower(self, widths: Tree, accumulation: int) -> dict[str, train_step.Part]:
        return self.step.lower(self.state, self.frozen, self.batch(widths, accumulation))
