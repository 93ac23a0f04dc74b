"""Memory of validation beside the training state, and of `eval`, on a training placement; a plan that counts both."""

import dataclasses
import types
from typing import cast

import jax
import pytest

from configs import large
from lw_jax import recipes
from lw_jax.core import config
from lw_jax.data.loader import eval_batches
from lw_jax.planning import generation_memory, plan_tables, planner, workload
from lw_jax.planning.generation_memory import generation
from lw_jax.training import evaluation_memory, memory, trainer
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.evaluation_memory import Pass
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.train_step import Part
from sharding import place
from sharding import placement as placements
from tests import tiny

pytestmark = pytest.mark.usefixtures("cache")
ROOM = MemoryLimit(10**12, 1.0)
# Arguments and working memory of `Step.evaluate` of configs/large.py as XLA compiles it for one H100, without Adam's
# moments, and for two that share the readers' products (jax 0.10.2): bytes by (strategy, devices, eval.batch).
COMPILED = {("single", 1, 64): 2.393e9, ("single", 1, 256): 7.634e9, ("tensor", 2, 64): 2.427e9}
NEAR = 0.25
TINY = (0.3, 2.0)  # of the compiled bytes beside the weights, of tiny models on a CPU


def make_program(cfg, strategy="single", devices=1, stands_for="") -> StepSpec:
    model = devices if strategy == "tensor" else 1
    placed = placements.place(strategy, recipes.reader_bytes(cfg), model=model, devices=jax.devices()[:devices])
    placed = dataclasses.replace(placed, stands_for=stands_for)
    return StepSpec(cfg, recipes.make(cfg, placed, outline=True))


def validation(program: StepSpec) -> Pass:
    return evaluation_memory.validation(program)


def peak(one: Pass | None, rows: int) -> int:
    assert one is not None
    return max(one.resident[mesh] + size for mesh, size in one.trace(rows).items())


def with_batch(cfg, batch: int):
    return dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, batch=batch))


@pytest.mark.parametrize("asked", COMPILED)
def test_working_memory_is_near_what_is_compiled(asked):
    strategy, devices, batch = asked
    whole = config.to_dict(config.build(large.get_config()))
    whole["compute"]["remat"] = "none"
    found = validation(make_program(config.build(whole), strategy, devices, stands_for="gpu")).trace(batch)
    assert max(found.values()) == pytest.approx(COMPILED[asked], rel=NEAR)


def test_a_batch_that_does_not_fit_is_told_with_the_one_that_does(root):
    one = validation(make_program(with_batch(tiny.make_config(root), 48), "replicate", 4))
    three, twelve = peak(one, 3), peak(one, 12)
    found = evaluation_memory.of(one, MemoryLimit(three, 1.0))
    wanted = (48, twelve, False, 12, False)
    assert dataclasses.astuple(found)[:5] == wanted, "halved as a run does: 48, 24, 12 on four devices"
    assert found.description.startswith("validation at") and "--config.eval.batch=12 would" in found.description
    assert evaluation_memory.of(one, MemoryLimit(twelve, 1.0)).fits
    nothing = evaluation_memory.of(one, MemoryLimit(1000, 1.0))
    assert (nothing.fits, nothing.largest, nothing.smallest_bytes > 1000) == (False, 0, True)


def test_a_plan_and_a_run_say_so(root):
    cfg = with_batch(
        tiny.make_config(root, train__micro_batch=1, mesh__placement="single", compute__dtype="fp32"), 4096
    )
    program = make_program(cfg)
    limit = peak(validation(program), 1024)
    mesh = dataclasses.replace(cfg.mesh, memory_gb=limit / 1e9 + 1e-6, target_utilisation=1.0)
    cfg = dataclasses.replace(cfg, mesh=mesh)
    found = planner.make(cfg, "h100x1", estimate=True)
    assert found.validation.largest == 1024 and "--config.eval.batch=1024 would" in plan_tables.report(found)
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


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("replicate", 4), ("split", 2)])
def test_what_is_compiled_is_what_a_validation_takes(strategy, devices, root):
    """The state stays, and beside it a batch, temporaries and outputs: of the very program that a run takes."""
    program = make_program(with_batch(tiny.make_config(root), 16), strategy, devices)
    one, recipe = validation(program), program.recipe
    limit = MemoryLimit(peak(one, 16 // devices) + 1000, 1.0)
    found = evaluation_memory.of(one, limit, compile=memory.compile_here)
    assert (found.batch, found.compiled) == (16, True)
    if strategy != "split":
        ((part, _),) = one.lower(16 // program.placement.data)
        taken = part.lowered.compile().memory_analysis()
        moments = place.device_bytes((program.state()["opt_state"], program.state()["step"]))
        whole = taken.argument_size_in_bytes + taken.temp_size_in_bytes + taken.output_size_in_bytes + moments
        assert found.peak_bytes == pytest.approx(whole, rel=1e-3), recipe


@pytest.mark.parametrize("make", [tiny.make_config, tiny.make_ttt_config])
def test_a_held_out_batch_has_the_planned_shapes_but_for_its_lengths(make, root):
    cfg = make(root)
    recipe = recipes.make(cfg, placements.place("single", recipes.reader_bytes(cfg)))
    recipe.build()
    batch = next(iter(eval_batches(recipe.validation()[0][1], 4)))
    batch.pop("valid")
    widths = recipe.validation_widths()
    assert jax.tree.structure(widths) == jax.tree.structure(batch)
    for planned, real in zip(jax.tree.leaves(widths), jax.tree.leaves(batch), strict=True):
        assert (planned.dtype, len(planned.shape)) == (real.dtype, real.ndim - 1)


class Compiler:
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


def test_sizes_that_a_larger_one_rules_out_are_not_compiled(root):
    """And one that the compiler refuses for its size does not fit."""
    compiler, limit = Compiler(row=10, fixed=100), MemoryLimit(1000 + 100 + 10 * 8, 1.0)
    program = make_program(with_batch(tiny.make_config(root), 1024))
    one = Pass("validation", program, {"mesh": 1000}, lambda rows: {"mesh": 10**6}, compiler.lower)  # type: ignore[dict-item]
    found = evaluation_memory.of(one, limit, compile=compiler.compile)
    assert (found.peak_bytes, found.largest, found.compiled) == (1000 + 100 + 10240, 8, True)
    assert compiler.rows == [1024, 16, 8]

    def refuse(lowered):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes")

    assert evaluation_memory.of(one, limit, compile=refuse).largest == 0


def test_compiled_memory_is_what_the_first_process_s_compiler_says(root, second):
    second(7000)
    program = make_program(with_batch(tiny.make_config(root), 4))
    one = Pass("validation", program, {"mesh": 10}, lambda rows: {"mesh": 10**6}, lambda rows: [])  # type: ignore[dict-item]
    assert evaluation_memory.of(one, MemoryLimit(10**4, 1.0), compile=lambda lowered: lowered).peak_bytes == 7000


# ---- generation


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("tensor", 2), ("split", 2)])
@pytest.mark.parametrize("kind", ["embeddings", "kv"])
def test_traced_generation_is_near_what_is_compiled(strategy, devices, kind, root):
    program = make_program(tiny.make_config(root, eval__batch=64, adapter__kind=kind), strategy, devices)
    one = generation(program)
    assert one is not None
    guess = evaluation_memory.of(one, ROOM)
    limit = MemoryLimit(guess.peak_bytes + 1, 1.0)
    found = evaluation_memory.of(one, limit, compile=memory.compile_here)
    assert found.compiled and not guess.compiled and found.batch == guess.batch
    held = max(one.resident.values())
    assert TINY[0] < (guess.peak_bytes - held) / (found.peak_bytes - held) < TINY[1]


def test_what_an_answer_takes_grows_with_its_rows_prompt_and_tokens(root):
    peaks = []
    for changes in (
        {},
        {"eval__batch": 32},
        {"eval__batch": 32, "data__context_tokens": 480},
        {"eval__batch": 32, "data__context_tokens": 480, "eval__max_new_tokens": 9000},
    ):
        program = make_program(tiny.make_config(root, **changes))
        peaks.append(peak(generation(program), program.cfg.eval.batch))
    assert sorted(set(peaks)) == peaks


def test_prompts_of_keys_and_values_hold_as_many_positions_and_are_planned_beside_texts(root):
    found = {}
    for kind in ("embeddings", "kv"):
        recipe = make_program(tiny.make_config(root, adapter__kind=kind, data__context_tokens=8)).recipe
        found[kind] = generation_memory.longest_prompts(recipe, "qwen", 4)
    (embedded,), (wire, text) = found["embeddings"], found["kv"]
    assert wire.positions == embedded.positions > text.positions == 8
    apart = wire.kv_prefix.mask.shape[1]
    assert wire.mask.shape[1] == embedded.mask.shape[1] - apart
    before = apart - 5
    assert before > 0 and wire.kv_prefix.k.shape == (3, 4, before + 5, 4, 6), (
        "layers, rows, the opening and slots, heads of keys, their width"
    )


def test_a_question_is_as_long_where_a_stage_s_passages_are_the_largest_batch(root):
    passages = {"stages__pretrain__share": 0.5, "stages__pretrain__lengths": (200,)}
    found = []
    for changes in ({}, passages):
        recipe = make_program(tiny.make_config(root, **changes)).recipe
        found.append(workload.prompts(recipe.cfg, recipe, "qwen").positions)
    widths = recipe.validation_widths()["readers"]["qwen"]
    assert widths["after"]["ids"].shape[0] < recipe.cfg.data.question_tokens, "the planned batch must be a passage's"
    assert found[0] == found[1]


def test_a_recipe_without_answers_has_none(root):
    assert generation(make_program(tiny.make_ttt_config(root))) is None


@pytest.mark.parametrize("estimate", [True, False])
def test_a_limit_that_only_evaluation_breaks_refuses_the_candidate(estimate, root, measure):
    """The step reads 5 latents; the texts beside which they are measured are a hundred times as long."""
    own = {"mesh__placement": "single", "train__micro_batch": 1, "compute__remat": "none"}
    own["compute__dtype"] = "fp32"  # on every platform
    long = tiny.make_config(root, data__context_tokens=4096, eval__batch=1, **own)
    needed = peak(generation(make_program(long)), 1)
    limit = needed - 1

    def planned(cfg, limit):
        mesh = dataclasses.replace(cfg.mesh, memory_gb=limit / 1e9, target_utilisation=1.0)
        return planner.make(dataclasses.replace(cfg, mesh=mesh), "h100x1" if estimate else "", estimate=estimate)

    refused = planned(long, limit)
    (row,) = refused.candidates
    assert row.peak_bytes <= limit, "the step fits"
    assert (refused.chosen, row.fits) == (None, False)
    assert row.obstacle.startswith("generation of one example per device needs ")
    assert "no: generation" in plan_tables.report(refused)

    taken = planned(long, needed + 1)
    assert taken.chosen and taken.generation.fits and not taken.generation.compiled
    assert taken.generation.description in plan_tables.report(taken)

    many = dataclasses.replace(long, eval=dataclasses.replace(long.eval, batch=64))
    fewer = planned(many, peak(generation(make_program(many)), 64) - 1)
    assert fewer.chosen and not fewer.generation.fits and 1 <= fewer.generation.largest < 64
    assert f"--config.eval.batch={fewer.generation.largest} would" in plan_tables.report(fewer)


def test_the_next_candidate_is_taken_where_the_best_cannot_be_evaluated(root, measure, monkeypatch):
    cfg = tiny.make_searched_config(root)
    real, refused = planner.evaluation_memory, []

    def ask(program, room, compile):
        found = real(program, room, compile)
        if not refused:
            refused.append(program.placement.strategy)
            none = dataclasses.replace(found["validation"], fits=False, largest=0, smallest_bytes=10**12)
            return found | {"validation": none}
        return found

    monkeypatch.setattr(planner, "evaluation_memory", ask)
    found = planner.make(cfg, "h100x2", estimate=True)
    rows = {row.strategy: row for row in found.candidates}
    assert rows[refused[0]].obstacle.startswith("validation of one example per device needs 1000.0 GB of ")
    assert found.chosen.strategy != refused[0] and found.validation.fits


@pytest.mark.slow
def test_what_is_clear_by_its_trace_is_not_compiled(root):
    program, asked = make_program(tiny.make_config(root)), []

    def compile(lowered):
        asked.append(lowered)
        return memory.compile_here(lowered)

    found = planner.evaluation_memory(program, ROOM, compile)
    assert not asked and not any(one.compiled for one in found.values() if one)
    doubled = max(2 * one.peak_bytes - one.resident_bytes for one in found.values() if one)
    found = planner.evaluation_memory(program, MemoryLimit(doubled // 3, 1.0), compile)
    assert {one.compiled for one in found.values() if one} == {True}
