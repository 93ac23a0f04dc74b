"""Memory of `eval` on a training placement: answers and scores of a batch, without the optimizer's moments."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core import eval_rows
from lw_jax.core.types import Tree
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.models import pass_costs
from lw_jax.models.wire import Prompt
from lw_jax.planning import workload
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
    found = validation_memory.weights_by_mesh(step_spec)
    found[step_spec.placement.learner] += place.device_bytes(step_spec.state()["trainable"])
    return found


def longest_prompt(recipe: LatentWire, name: str) -> int:
    """Returns the positions of the longest prompt among eval.rows: of the text, or of the latents."""
    cfg, fields = recipe.cfg, recipe.batch_widths()["readers"][name]
    before = sum(fields[key]["ids"].shape[0] for key in ("before", "literals") if key in fields)
    wire = before + cfg.encoder.slots + 1 + cfg.data.question_tokens
    texts = cfg.data.context_tokens if eval_rows.fields_of(cfg.eval.rows) else 0
    return max(wire, texts)


def _lower(recipe: LatentWire, name: str, size: int) -> list[tuple[Part, int]]:
    """Returns a reader's programs of generation and scoring for a batch, with the bytes of their inputs."""
    cfg, mesh, params = recipe.cfg, recipe.placement.readers[name].mesh, workload.reader(recipe, name)
    model, answers = recipe.wire.readers[name].config, cfg.data.answer_tokens
    dtype = frozen_models.precision_of(cfg, cfg.llms[name], recipe.placement.platform).values
    length, functions = longest_prompt(recipe, name), WireFunctions(recipe.wire, recipe.placement)

    def rows(*shape: int, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *shape), jnp.dtype(dtype), sharding=NamedSharding(mesh, P("data")))

    def generate(params: Tree, prompts: Tree) -> jax.Array:
        return functions.generate(params, Prompt(*prompts), name, cfg.eval.max_new_tokens)

    def score(params: Tree, prompts: Tree, fields: Tree) -> Tree:
        return functions.score(params, Prompt(*prompts), fields, name)

    prompts = rows(length, model.width, dtype=dtype), rows(length, dtype="bool")
    fields = {
        "answer_inputs": rows(answers - 1, dtype="int32"),
        "targets": rows(answers, dtype="int32"),
        "weights": rows(answers, dtype="float32"),
    }
    generating, scoring = jax.jit(generate).lower(params, prompts), jax.jit(score).lower(params, prompts, fields)
    given = place.device_bytes(prompts)
    return [(Part(generating, mesh), given), (Part(scoring, mesh), given + place.device_bytes(fields))]


def _working(recipe: LatentWire, name: str, rows: int) -> int:
    """Returns the bytes beside the weights of so many answers of a reader on a device, generated or scored."""
    cfg, llm, at = recipe.cfg, recipe.cfg.llms[name], recipe.placement.readers[name]
    model, params = recipe.wire.readers[name].config, workload.reader(recipe, name)
    own = frozen_models.precision_of(cfg, llm, recipe.placement.platform)
    dtype, length, answers = jnp.dtype(own.values), longest_prompt(recipe, name), cfg.data.answer_tokens
    prompt = rows * length * model.width * dtype.itemsize
    unpacked = pass_costs.restored_bytes(model, llm.weights, dtype.itemsize)

    def forward(positions: int) -> float:
        one = frozen_models.teacher_forced(cfg, at=at, own=own, rows=rows, positions=positions, answers=0)
        return pass_costs.forward_bytes(model, one) + unpacked / one.model

    split = at.mesh.shape["model"] if at.table == "tensor" else 1
    kept = split if model.kv_heads % split == 0 else 1
    cache = 2 * workload.cache_bytes(model, rows, length + cfg.eval.max_new_tokens, dtype) // kept
    layers = place.device_bytes(params["layers"]) if recipe.wire.readers[name].unstacked else 0
    logits = 2 * rows * model.vocab // split * 4
    generated = cache + layers + max(forward(length), logits)
    scored = forward(length + answers - 1) + answers * logits
    return int(prompt + max(generated, scored))
