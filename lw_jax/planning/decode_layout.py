"""Unrolled or scanned decode: one array per layer where it pays and fits, else a scan over stacked layers."""

import dataclasses

from lw_jax import recipes
from lw_jax.core import config, processes
from lw_jax.core.config import Config
from lw_jax.planning import host_memory, workload
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import memory
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from sharding import place
from sharding.placement import Placement

# From here on unrolled decode, ten seconds of compilation instead of two, pays off: on a GPU answers per reader, on a
# CPU bytes of a reader's weights read for a row of an evaluation, of which a scan copies each.
MANY = 1000
MANY_BYTES = 10**11


def resolve_layers(cfg: Config, placed: Placement, room: MemoryLimit | None) -> Config:
    """Resolves eval.layers="auto": unstacked for many answers, on a CPU for much weight, where memory allows.

    The first process decides: the others' programs must be the same, whatever memory their machines have left.
    """
    if cfg.recipe != "latentwire" or cfg.eval.layers != "auto":
        return cfg
    unstacked = processes.from_first(lambda: _pays(cfg, placed, room))
    return dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, layers="unstacked" if unstacked else "stacked"))


def _pays(cfg: Config, placed: Placement, room: MemoryLimit | None) -> bool:
    if placed.learner.devices.flat[0].platform == "gpu":
        many = not 0 < cfg.eval.examples < MANY
        many = many and cfg.encoder.kind != "cache"  # packed keys are one array: apart, XLA holds their slices too
        return many and room is not None and unstacked_bytes(cfg, placed) <= room.usable
    return _pays_on_cpu(cfg, placed)


def _pays_on_cpu(cfg: Config, placed: Placement) -> bool:
    readers, free = recipes.reader_bytes(cfg), host_memory.available()
    examples, largest = cfg.eval.examples or cfg.data.validation_limit or MANY, max(readers.values())
    tokens = -(-examples // cfg.eval.batch) * cfg.eval.max_new_tokens
    room = free is not None and host_memory.held(readers, placed) + largest <= free
    return room and tokens * largest >= MANY_BYTES


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
