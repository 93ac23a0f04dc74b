"""How readers answer: with an array for each layer where that pays and fits, else by a scan over the stacked layers."""

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

MANY = 1000  # answers of a reader from which on a program pays that compiles for ten seconds instead of two


def settle_layers(cfg: Config, placed: Placement, room: MemoryLimit | None) -> Config:
    """Returns the configuration without eval.layers "auto": apart on GPUs, of many answers, where memory allows."""
    if cfg.recipe != "latentwire" or cfg.eval.layers != "auto":
        return cfg
    many = not 0 < cfg.eval.examples < MANY
    on_gpu = placed.learner.devices.flat[0].platform == "gpu"  # a CPU answers as fast from the stacks
    apart = many and on_gpu and room is not None and bytes_apart(cfg, placed) <= room.usable
    return dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, layers="unstacked" if apart else "stacked"))


def bytes_apart(cfg: Config, placed: Placement) -> int:
    """Returns what the fullest device holds at most while a reader answers the longest prompts, its layers apart.

    That is all weights, the reader's layers once more and its cache twice; the moments of training, which reading does
    not load, stand for what else there is.
    """
    own = config.with_remat(cfg, "none")
    recipe = recipes.make(own, placed, outline=True)
    assert isinstance(recipe, LatentWire), "the recipe's name says so"
    return memory.placed_bytes(StepSpec(own, recipe)) + max(_copies(cfg, recipe, name) for name in placed.readers)


def _copies(cfg: Config, recipe: LatentWire, name: str) -> int:
    prompts, _ = workload.prompts(cfg, recipe, name)
    slots = max(prompts.shape[1], cfg.data.context_tokens) + cfg.eval.max_new_tokens
    rows, model = prompts.shape[0] // recipe.placement.data, recipe.wire.readers[name].config
    cache = workload.cache_bytes(model, rows, slots, prompts.dtype)
    return place.device_bytes(workload.reader(recipe, name)["layers"]) + 2 * cache
