"""Memory of validation beside the training state, and the eval.batch that fits."""

import dataclasses
from typing import cast

import jax
import pytest

from configs import large
from lw_jax import recipes
from lw_jax.core import config
from lw_jax.planning import plan_tables, planner
from lw_jax.training import trainer, validation_memory
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.recipe import Plannable
from lw_jax.training.step_spec import StepSpec
from sharding import place
from sharding import placement as placements
from tests import tiny

# Arguments and working memory of `Step.evaluate` of configs/large.py as XLA compiles it for one H100, without Adam's
# moments, and for two that share the readers' products (jax 0.10.2): bytes by (strategy, devices, eval.batch).
COMPILED = {("single", 1, 64): 2.393e9, ("single", 1, 256): 7.634e9, ("tensor", 2, 64): 2.427e9}
NEAR = 0.15


def make_program(cfg, strategy: str = "single", devices: int = 1) -> tuple[StepSpec, Plannable]:
    model = devices if strategy == "tensor" else 1
    on = jax.devices()[:devices]
    placed = placements.place(strategy, recipes.reader_bytes(cfg), model=model, devices=on)
    recipe = recipes.make(cfg, placed, outline=True)
    return StepSpec(cfg, recipe), recipe


def with_batch(cfg, batch: int):
    return dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, batch=batch))


@pytest.mark.parametrize("asked", COMPILED)
def test_working_memory_is_near_what_is_compiled(asked):
    strategy, devices, batch = asked
    whole = config.to_dict(config.build(large.get_config()))
    whole["compute"]["remat"] = "none"
    program, recipe = make_program(config.build(whole), strategy, devices)
    terms = recipe.terms(recipe.batch_widths(), batch)
    assert max(one.forward for one in terms.values()) == pytest.approx(COMPILED[asked], rel=NEAR)
    held = place.device_bytes(program.state()) + sum(map(place.device_bytes, program.frozen().values()))
    found = validation_memory.evaluation_bytes(program, recipe, recipe.batch_widths(), batch)
    assert found - held == int(max(one.forward for one in terms.values()))


def test_a_batch_that_does_not_fit_is_told_with_the_one_that_does(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "readers"
    program, recipe = make_program(with_batch(tiny.make_config(root), 48), "replicate", 4)
    widths = recipe.batch_widths()
    three, twelve = (validation_memory.evaluation_bytes(program, recipe, widths, rows) for rows in (3, 12))
    found = validation_memory.estimate(program, recipe, widths, MemoryLimit(three, 1.0))
    assert dataclasses.astuple(found) == (48, twelve, False, 12), "halved as a run does: 48, 24, 12 on four devices"
    assert "--config.eval.batch=12 would" in validation_memory.describe(found, MemoryLimit(three, 1.0))
    assert validation_memory.estimate(program, recipe, widths, MemoryLimit(twelve, 1.0)).fits
    nothing = validation_memory.estimate(program, recipe, widths, MemoryLimit(1000, 1.0))
    assert (nothing.fits, nothing.largest) == (False, 0)


def test_a_plan_and_a_run_say_so(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "readers"
    cfg = with_batch(tiny.make_config(root, train__micro_batch=1, mesh__placement="single"), 4096)
    program, recipe = make_program(cfg)
    limit = validation_memory.evaluation_bytes(program, recipe, recipe.batch_widths(), 1024)
    mesh = dataclasses.replace(cfg.mesh, memory_gb=limit / 1e9 + 1e-6, target_utilisation=1.0)
    cfg = dataclasses.replace(cfg, mesh=mesh)
    found = planner.make(cfg, "h100x1", estimate=True)
    assert found["validation"]["largest"] == 1024 and "--config.eval.batch=1024 would" in plan_tables.report(found)
    told: list[str] = []
    real = recipes.make(cfg, program.placement)
    run = trainer.Run(cfg, real, None, None)
    run.reporter.say = lambda *lines: told.extend(lines)
    run._choose_micro_batch(real.data_schedule())
    assert told == [], "a run without checkpoints does not validate"
    run.checkpointer = cast(Checkpointer, object())
    run._choose_micro_batch(real.data_schedule())
    assert any("--config.eval.batch=1024 would" in line for line in told)
