"""Memory of `eval` on a training placement: answers and scores of a batch, without the optimizer's moments."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core import eval_rows
from lw_jax.core.types import Tree
from lw_jax.evals.wire_functions import scores_of
from lw_jax.models import pass_costs
from lw_jax.models.wire import Prompt
from lw_jax.planning import workload
from lw_jax.planning.workload import PromptShapes
from lw_jax.recipes import frozen_models
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import validation_memory
from lw_jax.training.memory import Compile
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.train_step import Part
from lw_jax.training.validation_memory import Compiled, ValidationMemory
from sharding import place


def estimate(step_spec: StepSpec, limit: MemoryLimit) -> ValidationMemory | None:
    """Returns the memory by arithmetic; None for a recipe whose evaluation generates nothing."""
    recipe = step_spec.recipe
    if not isinstance(recipe, LatentWire):
        return None
    resident = _resident(step_spec)

    def held(rows: int) -> int:
        peaks = dict(resident)
        for name, at in recipe.placement.readers.items():
            peaks[at.mesh] = max(peaks[at.mesh], resident[at.mesh] + _working(recipe, name, rows))
        return max(peaks.values())

    return validation_memory.search(step_spec, limit, held, resident=resident, compiled=False)


def measure(step_spec: StepSpec, limit: MemoryLimit, *, compile: Compile) -> ValidationMemory | None:
    """Returns the memory, compiled for the step's own devices; None as `estimate`."""
    recipe = step_spec.recipe
    if not isinstance(recipe, LatentWire):
        return None

    def lower(rows: int) -> list[tuple[Part, int]]:
        size = rows * recipe.placement.data
        return [part for name in recipe.placement.readers for part in _lower(recipe, name, size)]

    resident = _resident(step_spec)
    held = Compiled(resident, lower, compile, limit)
    return validation_memory.search(step_spec, limit, held, resident=resident, compiled=True)


def _resident(step_spec: StepSpec) -> dict[Mesh, int]:
    """Returns the bytes of weights on one device of each mesh, the trainable ones included."""
    found = step_spec.frozen_bytes()
    found[step_spec.placement.learner] += place.device_bytes(step_spec.state()["trainable"])
    return found


def longest_prompts(recipe: LatentWire, name: str, size: int) -> list[PromptShapes]:
    """Returns the longest prompts of eval.rows as shapes: of a text or from latents, both where they differ in kind."""
    cfg, wire = recipe.cfg, workload.prompts(recipe.cfg, recipe, name, size)
    if not eval_rows.fields_of(cfg.eval.rows):
        return [wire]
    text = workload.text_prompts(recipe, name, size, cfg.data.context_tokens)
    if wire.kv_prefix is None:
        return [max(wire, text, key=lambda prompt: prompt.positions)]
    return [wire, text]


def _lower(recipe: LatentWire, name: str, size: int) -> list[tuple[Part, int]]:
    """Returns a reader's programs that answer and score a batch, with the bytes of their inputs."""
    cfg, mesh, params = recipe.cfg, recipe.placement.readers[name].mesh, workload.reader(recipe, name)
    answers = cfg.data.answer_tokens

    def rows(*shape: int, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *shape), jnp.dtype(dtype), sharding=NamedSharding(mesh, P("data")))

    def answer(params: Tree, prompts: Tree, fields: Tree) -> Tree:
        prompt, most = Prompt(*prompts), cfg.eval.max_new_tokens
        ids, logits = recipe.wire.answer(params, name, prompt, fields, max_new_tokens=most)
        return ids, scores_of(logits, fields)

    fields = {
        "answer_inputs": rows(answers - 1, dtype="int32"),
        "targets": rows(answers, dtype="int32"),
        "weights": rows(answers, dtype="float32"),
    }
    found = []
    for prompts in longest_prompts(recipe, name, size):
        given = place.device_bytes(prompts) + place.device_bytes(fields)
        found.append((Part(jax.jit(answer).lower(params, prompts, fields), mesh), given))
    return found


def _working(recipe: LatentWire, name: str, rows: int) -> int:
    """Returns the bytes beside the weights of so many answers of a reader on a device, generated and scored."""
    cfg, llm, at = recipe.cfg, recipe.cfg.llms[name], recipe.placement.readers[name]
    model, params = recipe.wire.readers[name].config, workload.reader(recipe, name)
    own = frozen_models.precision_of(cfg, llm, recipe.placement.platform)
    dtype, answers = jnp.dtype(own.values), cfg.data.answer_tokens
    unpacked = pass_costs.restored_bytes(model, llm.weights, dtype.itemsize)

    split = at.mesh.shape["model"] if at.table == "tensor" else 1
    kept = split if model.kv_heads % split == 0 else 1
    layers = place.device_bytes(params["layers"]) if recipe.wire.readers[name].unstacked else 0
    logits = 2 * rows * model.vocab // split * 4

    def needs(prompts: PromptShapes) -> float:
        length = prompts.mask.shape[1]  # computed; what stands before it is given

        def forward(positions: int) -> float:
            one = frozen_models.teacher_forced(cfg, at=at, own=own, rows=rows, positions=positions, answers=0)
            one = dataclasses.replace(one, before=prompts.positions - length)
            return pass_costs.forward_bytes(model, one) + unpacked / one.model

        room = max(cfg.eval.max_new_tokens, answers - 1)
        cache = 2 * workload.cache_bytes(model, rows, prompts.positions + room, dtype) // kept
        given = rows * length * model.width * dtype.itemsize
        if prompts.kv_prefix is not None:  # given, and once more where its keys are turned
            given += 2 * workload.cache_bytes(model, rows, prompts.kv_prefix.mask.shape[1], dtype) // kept
        return given + cache + layers + max(forward(length + answers - 1), answers * logits)

    return int(max(map(needs, longest_prompts(recipe, name, rows * recipe.placement.data))))
