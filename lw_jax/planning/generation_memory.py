"""Generation as a pass whose memory is planned: answers and scores of a batch, without the optimizer's moments."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core import eval_rows
from lw_jax.core.types import Tree
from lw_jax.evals.wire_functions import scores_of
from lw_jax.models.wire import Prompt
from lw_jax.planning import workload
from lw_jax.planning.workload import PromptShapes
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import step_costs
from lw_jax.training.evaluation_memory import Pass
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.traced_costs import trace
from lw_jax.training.train_step import Part
from sharding import place


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
        found = dict.fromkeys(placement.meshes, 0)
        for name, at in placement.readers.items():
            for call, given in _answers(local, name, rows):
                found[at.mesh] = max(found[at.mesh], place.device_bytes(given[1:]) + trace(call, *given).peak)
        return found

    def lower(rows: int) -> list[tuple[Part, int]]:
        return [
            (Part(jax.jit(call).lower(*given), at.mesh), place.device_bytes(given[1:]))
            for name, at in placement.readers.items()
            for call, given in _answers(recipe, name, rows * placement.data)
        ]

    return Pass("generation", step_spec, resident, working, lower)


def longest_prompts(recipe: LatentWire, name: str, size: int) -> list[PromptShapes]:
    """Returns the longest prompts of eval.rows as shapes: of a text or from latents, both where they differ in kind."""
    cfg, wire = recipe.cfg, workload.prompts(recipe.cfg, recipe, name, size)
    if not eval_rows.fields_of(cfg.eval.rows):
        return [wire]
    text = workload.text_prompts(recipe, name, size, cfg.data.context_tokens)
    if wire.kv_prefix is None:
        return [max(wire, text, key=lambda prompt: prompt.positions)]
    return [wire, text]


def _answers(recipe: LatentWire, name: str, size: int) -> list[tuple[Callable[..., Tree], tuple[Tree, Tree, Tree]]]:
    cfg, mesh, params = recipe.cfg, recipe.placement.readers[name].mesh, workload.reader(recipe, name)
    answers = cfg.data.answer_tokens

    def rows(*shape: int, dtype: str) -> jax.ShapeDtypeStruct:
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
    return [(answer, (params, prompts, fields)) for prompts in longest_prompts(recipe, name, size)]
