"""Memory of validation beside the training state, and the eval.batch that fits."""

import dataclasses
import types
from typing import cast

import jax
import pytest

from configs import large
from lw_jax import recipes
from lw_jax.core import config
from lw_jax.data.loader import eval_batches
from lw_jax.planning import plan_tables, planner
from lw_jax.training import memory, trainer, validation_memory
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.recipe import Recipe
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.train_step import Part
from sharding import place
from sharding import placement as placements
from tests import tiny

# Arguments and working memory of `Step.evaluate` of configs/large.py as XLA compiles it for one H100, without Adam's
# moments, and for two that share the readers' products (jax 0.10.2): bytes by (strategy, devices, eval.batch).
COMPILED = {("single", 1, 64): 2.393e9, ("single", 1, 256): 7.634e9, ("tensor", 2, 64): 2.427e9}
NEAR = 0.15


def make_program(cfg, strategy: str = "single", devices: int = 1, *, stands_for: str = "") -> tuple[StepSpec, Recipe]:
    model = devices if strategy == "tensor" else 1
    on = jax.devices()[:devices]
    placed = placements.place(strategy, recipes.reader_bytes(cfg), model=model, devices=on)
    placed = dataclasses.replace(placed, stands_for=stands_for)
    recipe = recipes.make(cfg, placed, outline=True)
    return StepSpec(cfg, recipe), recipe


def with_batch(cfg, batch: int):
    return dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, batch=batch))


@pytest.mark.parametrize("asked", COMPILED)
def test_working_memory_is_near_what_is_compiled(asked):
    strategy, devices, batch = asked
    whole = config.to_dict(config.build(large.get_config()))
    whole["compute"]["remat"] = "none"
    program, recipe = make_program(config.build(whole), strategy, devices, stands_for="gpu")
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
    wanted = (48, twelve, False, 12, False)
    assert dataclasses.astuple(found)[:5] == wanted, "halved as a run does: 48, 24, 12 on four devices"
    assert "--config.eval.batch=12 would" in validation_memory.describe(found, MemoryLimit(three, 1.0))
    assert validation_memory.estimate(program, recipe, widths, MemoryLimit(twelve, 1.0)).fits
    nothing = validation_memory.estimate(program, recipe, widths, MemoryLimit(1000, 1.0))
    assert (nothing.fits, nothing.largest, nothing.smallest_bytes > 1000) == (False, 0, True)


def test_a_plan_and_a_run_say_so(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "readers"
    cfg = with_batch(
        tiny.make_config(root, train__micro_batch=1, mesh__placement="single", compute__dtype="fp32"), 4096
    )
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
    assert run.validation_loop._batch.size == 4096
    run.checkpointer = cast(Checkpointer, object())
    run._choose_micro_batch(real.data_schedule())
    assert any("--config.eval.batch=1024 would" in line for line in told)
    assert run.validation_loop._batch.size == 1024, "from the start: several processes cannot halve it during the run"


# ---- compiled, for the devices of this process


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("replicate", 4), ("split", 2)])
def test_what_is_compiled_is_what_a_validation_takes(strategy, devices, tmp_path_factory):
    """The state stays, and beside it a batch, temporaries and outputs: of the very program that a run takes."""
    cfg = with_batch(tiny.make_config(tmp_path_factory.getbasetemp() / "readers"), 16)
    program, recipe = make_program(cfg, strategy, devices)
    found = validation_memory.measure(
        program, recipe.validation_widths(), MemoryLimit(10**12, 1.0), compile=memory.compile_here
    )
    assert (found.batch, found.largest, found.fits, found.compiled) == (16, 16, True, True)
    guess = validation_memory.estimate(program, recipe, recipe.validation_widths(), MemoryLimit(10**12, 1.0))
    held = max(program.frozen_bytes().values())
    assert held < found.peak_bytes < 3 * guess.peak_bytes
    if strategy != "split":
        batch = validation_memory._batch(program, recipe.validation_widths(), 16)
        key = jax.eval_shape(lambda: jax.random.key(0))
        arguments = (program.state()["trainable"], program.frozen(), batch, key)
        taken = jax.jit(recipe.loss).lower(*arguments).compile().memory_analysis()
        moments = place.device_bytes((program.state()["opt_state"], program.state()["step"]))
        whole = taken.argument_size_in_bytes + taken.temp_size_in_bytes + taken.output_size_in_bytes + moments
        assert found.peak_bytes == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("make", [tiny.make_config, tiny.make_ttt_config])
def test_a_held_out_batch_has_the_planned_shapes_but_for_its_lengths(make, tmp_path_factory):
    cfg = make(tmp_path_factory.getbasetemp() / "readers")
    recipe = recipes.make(cfg, placements.place("single", recipes.reader_bytes(cfg)))
    recipe.build()
    batch = next(iter(eval_batches(recipe.validation()[0][1], 4)))
    batch.pop("valid")
    widths = recipe.validation_widths()
    assert jax.tree.structure(widths) == jax.tree.structure(batch)
    for planned, real in zip(jax.tree.leaves(widths), jax.tree.leaves(batch), strict=True):
        assert (planned.dtype, len(planned.shape)) == (real.dtype, real.ndim - 1)


class Asked:
    """A compiler that knows how much each row takes, and which sizes it was asked for."""

    def __init__(self, row: int, fixed: int):
        self.row, self.fixed, self.rows = row, fixed, []

    def lower(self, rows):
        self.rows.append(rows)
        return [(Part(rows, "mesh"), 0)]

    def compile(self, rows):
        sizes = {"temp_size_in_bytes": self.fixed + rows * self.row, "output_size_in_bytes": 0}
        found = types.SimpleNamespace(**sizes, alias_size_in_bytes=0)
        return types.SimpleNamespace(memory_analysis=lambda: found)


def test_sizes_that_a_larger_one_rules_out_are_not_compiled():
    asked, limit = Asked(row=10, fixed=100), MemoryLimit(1000 + 100 + 10 * 8, 1.0)
    held = validation_memory.Compiled({"mesh": 1000}, asked.lower, asked.compile, limit)
    assert held(1024) == 1000 + 100 + 10240
    assert held(512) > limit.usable and held(64) > limit.usable
    assert held(8) == limit.usable
    assert asked.rows == [1024, 8]

    def refuse(lowered):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes")

    assert validation_memory.Compiled({"mesh": 1000}, asked.lower, refuse, limit)(1) > limit.usable


def test_compiled_memory_is_what_the_first_process_s_compiler_says(second):
    second(7000)
    held = validation_memory.Compiled({None: 10}, lambda rows: [], lambda lowered: lowered, MemoryLimit(10**6, 1.0))
    assert held(4) == 7000
