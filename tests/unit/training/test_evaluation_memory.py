"""Memory of validation beside the training state, and of `eval`, on a training placement; a plan that counts both."""

import dataclasses
from typing import cast

import jax
import pytest

from configs import large
from lw_jax import recipes
from lw_jax.core import config
from lw_jax.data.loader import eval_batches
from lw_jax.planning import plan_tables, planner
from lw_jax.planning.generation_memory import generation
from lw_jax.training import evaluation_memory, memory, trainer
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.evaluation_memory import Pass
from lw_jax.training.memory_limit import MemoryLimit
from tests import tiny

pytestmark = pytest.mark.usefixtures("cache")
ROOM = MemoryLimit(10**12, 1.0)
# Arguments and working memory of `Step.evaluate` of configs/large.py as XLA compiles it for one H100, without Adam's
# moments, and for two that share the readers' products (jax 0.10.2): bytes by (strategy, devices, eval.batch).
COMPILED = {("single", 1, 256): 7.634e9, ("tensor", 2, 64): 2.427e9}
NEAR = 0.25
TINY = (0.3, 2.0)  # of the compiled bytes beside the weights, of tiny models on a CPU


def peak(one: Pass | None, rows: int) -> int:
    assert one is not None
    return max(one.resident[mesh] + size for mesh, size in one.trace(rows).items())


def make(root, batch: int, **changes):
    """One reader, everything that a plan would choose given."""
    own = {"mesh__placement": "single", "train__micro_batch": 1, "compute__dtype": "fp32"}  # on every platform
    return tiny.make_config(root, only="llama", eval__batch=batch, **own | changes)


def limited(limit: float) -> dict[str, float]:
    return {"mesh__memory_gb": limit / 1e9, "mesh__target_utilisation": 1.0}


@pytest.mark.parametrize("asked", COMPILED)
def test_working_memory_is_near_what_is_compiled(asked):
    strategy, devices, batch = asked
    whole = config.to_dict(config.build(large.get_config()))
    whole["compute"]["remat"] = "none"
    program = tiny.outline(config.build(whole), strategy, devices, stands_for="gpu")
    found = evaluation_memory.validation(program).trace(batch)
    assert max(found.values()) == pytest.approx(COMPILED[asked], rel=NEAR)


def test_a_batch_that_does_not_fit_is_told_with_the_one_that_does(root):
    one = evaluation_memory.validation(tiny.outline(make(root, 48), "replicate", 4))
    three, twelve = peak(one, 3), peak(one, 12)
    found = evaluation_memory.of(one, MemoryLimit(three, 1.0))
    wanted = (48, twelve, False, 12, False)
    assert dataclasses.astuple(found)[:5] == wanted, "halved as a run does: 48, 24, 12 on four devices"
    assert found.description.startswith("validation at") and "--config.eval.batch=12 would" in found.description
    assert evaluation_memory.of(one, MemoryLimit(twelve, 1.0)).fits
    nothing = evaluation_memory.of(one, MemoryLimit(1000, 1.0))
    assert (nothing.fits, nothing.largest, nothing.smallest_bytes > 1000) == (False, 0, True)


def test_a_plan_and_a_run_say_so(root):
    program = tiny.outline(make(root, 4096))
    cfg = make(root, 4096, **limited(peak(evaluation_memory.validation(program), 1024) + 1000))
    found = planner.make(cfg, "h100x1", estimate=True)
    assert found.validation.largest == 1024 and "--config.eval.batch=1024" in plan_tables.report(found)
    recipe = recipes.make(cfg, program.placement)
    run = trainer.Run(cfg, recipe, cast(Checkpointer, object()), None)
    run._choose_micro_batch(recipe.data_schedule())
    assert run.validation_loop.batch.size == 1024, "from the start: several processes cannot halve it later"


@pytest.mark.parametrize("kind", [tiny.make_config, tiny.make_ttt_config])
def test_a_held_out_batch_has_the_planned_shapes_but_for_its_lengths(kind, root):
    cfg = kind(root)
    recipe = recipes.make(cfg, tiny.place(cfg))
    recipe.load_frozen()
    batch = next(iter(eval_batches(recipe.validation()[0][1], 4)))
    batch.pop("valid")
    widths = recipe.validation_widths()
    assert jax.tree.structure(widths) == jax.tree.structure(batch)
    for planned, real in zip(jax.tree.leaves(widths), jax.tree.leaves(batch), strict=True):
        assert (planned.dtype, len(planned.shape)) == (real.dtype, real.ndim - 1)


# ---- generation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices", "kind"), [("single", 1, "kv"), ("tensor", 2, "embeddings"), ("split", 2, "kv")]
)
def test_traced_generation_is_near_what_is_compiled(strategy, devices, kind, root):
    program = tiny.outline(tiny.make_config(root, eval__batch=64, adapter__kind=kind), strategy, devices)
    one = generation(program)
    assert one is not None
    guess = evaluation_memory.of(one, ROOM)
    limit = MemoryLimit(guess.peak_bytes + 1, 1.0)
    found = evaluation_memory.of(one, limit, compile=memory.compile_here)
    assert found.compiled and not guess.compiled and found.batch == guess.batch
    held = max(one.resident.values())
    assert TINY[0] < (guess.peak_bytes - held) / (found.peak_bytes - held) < TINY[1]


def test_a_limit_that_only_evaluation_breaks_refuses_the_candidate(root):
    """The step reads 5 latents; the texts beside which they are measured are a hundred times as long."""
    long = {"data__context_tokens": 4096}
    needed, more = (peak(generation(tiny.outline(make(root, batch, **long))), batch) for batch in (1, 64))

    def planned(batch, limit):
        return planner.make(make(root, batch, **long, **limited(limit)), "h100x1", estimate=True)

    refused = planned(1, needed - 1)
    (row,) = refused.candidates
    assert row.peak_bytes < needed, "the step fits"
    assert (refused.chosen, row.fits) == (None, False) and "generation" in row.obstacle
    taken = planned(1, needed + 1)
    assert taken.chosen and taken.generation.fits and not taken.generation.compiled
    fewer = planned(64, more - 1)
    assert fewer.chosen and not fewer.generation.fits and 1 <= fewer.generation.largest < 64
    assert f"--config.eval.batch={fewer.generation.largest}" in plan_tables.report(fewer)
