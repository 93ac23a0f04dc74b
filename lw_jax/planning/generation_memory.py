"""Generation as a pass whose memory is planned: answers and scores of a batch, without the optimizer's moments.

Decoding is unrolled, one array a layer, where it pays and fits, else a scan over stacked layers.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from lw_jax import recipes
from lw_jax.core import config, eval_rows, processes
from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.evals.wire_functions import scores_of
from lw_jax.models.wire import Prompt
from lw_jax.planning import host_memory, workload
from lw_jax.planning.workload import PromptShapes
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import memory, step_costs
from lw_jax.training.evaluation_memory import Pass
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.traced_costs import trace
from lw_jax.training.train_step import Part
from sharding import place
from sharding.placement import Placement

# From here on unrolled decode, ten seconds of compilation instead of two, pays off: on a GPU answers per reader, on a
# CPU bytes of a reader's weights read for a row of an evaluation, of which a scan copies each.
MANY = 1000
MANY_BYTES = 10**11


def generation(step_spec: StepSpec) -> Pass | None:
    """Returns generation by every reader on the step's placement; None for a recipe whose evaluation generates none."""
    recipe = step_spec.recipe
    if not isinstance(recipe, LatentWire):
        return None
    placement = recipe.placement
    resident = step_spec.frozen_bytes()
    resident[placement.learner] += place.device_bytes(step_spec.state["trainable"])
    local = step_costs.on_one_device(step_spec)
    assert isinstance(local, LatentWire), "the same recipe"

    def working(rows: int) -> dict[Mesh, int]:
        peaks = dict.fromkeys(placement.meshes, 0)
        for name, reader in placement.readers.items():
            for call, args in _answers(local, name, rows):
                costs = step_costs.once(local, name, "answer", args, lambda call=call, args=args: trace(call, *args))
                peaks[reader.mesh] = max(peaks[reader.mesh], place.device_bytes(args[1:]) + costs.peak)
        return peaks

    def lower(rows: int) -> list[tuple[Part, int]]:
        return [
            (Part(jax.jit(call).lower(*args), reader.mesh), place.device_bytes(args[1:]))
            for name, reader in placement.readers.items()
            for call, args in _answers(recipe, name, rows * placement.data)
        ]

    return Pass("generation", step_spec, resident, working, lower)


def longest_prompts(recipe: LatentWire, name: str, size: int) -> list[PromptShapes]:
    """Returns the longest prompts of eval.rows as shapes: of a text or from latents, both where they differ in kind."""
    cfg, wire = recipe.cfg, workload.prompts(recipe, name, size)
    if not any(eval_rows.ROWS[row].fields for row in cfg.eval.rows):
        return [wire]
    text = workload.text_prompts(recipe, name, size, cfg.data.context_tokens)
    if wire.kv_prefix is None:
        return [max(wire, text, key=lambda prompt: prompt.positions)]
    return [wire, text]


def _answers(recipe: LatentWire, name: str, size: int) -> list[tuple[Callable[..., Tree], tuple[Tree, Tree, Tree]]]:
    cfg, mesh, params = recipe.cfg, recipe.placement.readers[name].mesh, recipe.placed().frozen[name]
    answers = cfg.data.answer_tokens

    def answer(params: Tree, prompts: Tree, fields: Tree) -> Tree:
        prompt, most = Prompt(*prompts), cfg.eval.max_new_tokens
        ids, logits = recipe.wire.answer(params, name, prompt, fields, max_new_tokens=most)
        return ids, scores_of(logits, fields)

    fields = {
        "answer_inputs": workload.row_shapes((size, answers - 1), "int32", mesh),
        "targets": workload.row_shapes((size, answers), "int32", mesh),
        "weights": workload.row_shapes((size, answers), "float32", mesh),
    }
    return [(answer, (params, prompts, fields)) for prompts in longest_prompts(recipe, name, size)]


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
    resolved = config.with_remat(cfg, "none")
    recipe = recipes.make(resolved, placed, outline=True)
    assert isinstance(recipe, LatentWire), "the recipe's name says so"
    return memory.placed_bytes(StepSpec(resolved, recipe)) + max(_copies(cfg, recipe, name) for name in placed.readers)


def _copies(cfg: Config, recipe: LatentWire, name: str) -> int:
    prompts = workload.prompts(recipe, name)
    slots = max(prompts.positions, cfg.data.context_tokens) + cfg.eval.max_new_tokens
    rows, model = len(prompts.mask) // recipe.placement.data, recipe.wire.readers[name].config
    cache = workload.cache_bytes(model, rows, slots, prompts.embeddings.dtype)
    return place.device_bytes(recipe.placed().frozen[name]["layers"]) + 2 * cache
