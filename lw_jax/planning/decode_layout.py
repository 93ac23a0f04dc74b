"""Unrolled or scanned decode: one array per layer on GPUs where it pays and fits, else a scan over stacked layers."""

import dataclasses

from lw_jax import recipes
from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.planning import workload
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import memory
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from sharding import place
from sharding.placement import Placement

MANY = 1000  # answers per reader from which unrolled decode, ten seconds of compilation instead of two, pays off


def settle_layers(cfg: Config, placed: Placement, room: MemoryLimit | None) -> Config:
    """Resolves eval.layers="auto": unstacked on GPUs, for many answers, where memory allows."""
    if cfg.recipe != "latentwire" or cfg.eval.layers != "auto":
        return cfg
    many = not 0 < cfg.eval.examples < MANY
    on_gpu = placed.learner.devices.flat[0].platform == "gpu"  # a CPU decodes as fast from stacked layers
    unstacked = many and on_gpu and room is not None and unstacked_bytes(cfg, placed) <= room.usable
    return dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, layers="unstacked" if unstacked else "stacked"))


def unstacked_bytes(cfg: Config, placed: Placement) -> int:
    """Returns the peak bytes of the fullest device while a reader decodes the longest prompts, layers unstacked.

    The sum of all weights, the reader's layers once more and its KV cache twice. Optimizer moments, which evaluation
    does not load, stand for everything else.
    """
    own = config.with_remat(cfg, "none")
    recipe = recipes.make(own, placed, outline=True)
    assert isinstance(recipe, LatentWire), "the recipe's name says so"
    return memory.placed_bytes(StepSpec(own, recipe)) + max(_copies(cfg, recipe, name) for name in placed.readers)


def _copies(cfg: Config, recipe: LatentWire, name: str) -> int:
    prompts = workload.prompts(cfg, recipe, name)
    slots = max(prompts.positions, cfg.data.context_tokens) + cfg.eval.max_new_tokens
    rows, model = len(prompts.mask) // recipe.placement.data, recipe.wire.readers[name].config
    cache = workload.cache_bytes(model, rows, slots, prompts.embeddings.dtype)
    return place.device_bytes(workload.reader(recipe, name)["layers"]) + 2 * cache
