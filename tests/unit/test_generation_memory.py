"""lw_jax/planning/generation_memory.py: memory of `eval` on a training placement, and a plan that counts it."""

import dataclasses

import jax
import pytest

from lw_jax import recipes
from lw_jax.planning import generation_memory, plan_tables, planner, workload
from lw_jax.training import memory
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from sharding import placement as placements
from tests import tiny

pytestmark = pytest.mark.usefixtures("cache")
ROOM = MemoryLimit(10**12, 1.0)
NEAR = (0.5, 2.0)  # of the compiled bytes beside the weights, of tiny models on a CPU


def make_program(cfg, strategy="single", devices=1, **axes) -> StepSpec:
    placed = placements.place(strategy, recipes.reader_bytes(cfg), devices=jax.devices()[:devices], **axes)
    return StepSpec(cfg, recipes.make(cfg, placed, outline=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices", "axes"),
    [("single", 1, {}), ("replicate", 4, {}), ("tensor", 2, {"model": 2}), ("split", 2, {})],
)
@pytest.mark.parametrize("kind", ["embeddings", "kv"])
def test_arithmetic_is_near_what_is_compiled(strategy, devices, axes, kind, root):
    program = make_program(tiny.make_config(root, eval__batch=64, adapter__kind=kind), strategy, devices, **axes)
    found = generation_memory.measure(program, ROOM, compile=memory.compile_here)
    guess = generation_memory.estimate(program, ROOM)
    assert found.compiled and not guess.compiled and (found.batch, found.largest) == (guess.batch, guess.largest)
    held = max(generation_memory._resident(program).values())
    assert NEAR[0] < (guess.peak_bytes - held) / (found.peak_bytes - held) < NEAR[1]


def test_what_an_answer_takes_grows_with_its_rows_prompt_and_unstacked_layers(root):
    cfg = tiny.make_config(root)
    base = generation_memory.estimate(make_program(cfg), ROOM).peak_bytes
    peaks = [base]
    for changes in (
        {"eval__batch": 32},
        {"eval__batch": 32, "data__context_tokens": 480},
        {"eval__batch": 32, "data__context_tokens": 480, "eval__max_new_tokens": 9000},
        {"eval__batch": 32, "data__context_tokens": 480, "eval__max_new_tokens": 9000, "eval__layers": "unstacked"},
    ):
        program = make_program(tiny.make_config(root, **changes))
        peaks.append(generation_memory.estimate(program, ROOM).peak_bytes)
    assert sorted(set(peaks)) == peaks
    latents = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, rows=("latents", "shuffled")))
    assert generation_memory.estimate(make_program(latents), ROOM).peak_bytes < base, "no text prompt is read"


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
    cfg = tiny.make_ttt_config(root)
    assert generation_memory.estimate(make_program(cfg), ROOM) is None


@pytest.mark.parametrize("estimate", [True, False])
def test_a_limit_that_only_evaluation_breaks_refuses_the_candidate(estimate, root, measure):
    """The step reads 5 latents; the texts beside which they are measured are a hundred times as long."""
    own = {"mesh__placement": "single", "train__micro_batch": 1, "compute__remat": "none"}
    own["compute__dtype"] = "fp32"  # on every platform
    long = tiny.make_config(root, data__context_tokens=4096, eval__batch=1, **own)
    program = make_program(long)
    generation = generation_memory.estimate(program, ROOM).peak_bytes
    limit = generation - 1

    def planned(cfg, limit):
        mesh = dataclasses.replace(cfg.mesh, memory_gb=limit / 1e9, target_utilisation=1.0)
        return planner.make(dataclasses.replace(cfg, mesh=mesh), "h100x1" if estimate else "", estimate=estimate)

    refused = planned(long, limit)
    (row,) = refused["candidates"]
    assert row["peak_bytes"] <= limit, "the step fits"
    assert (refused["chosen"], row["fits"]) == (None, False)
    assert row["obstacle"].startswith("generation of one example per device needs ")
    assert "no: generation" in plan_tables.report(refused)

    taken = planned(long, generation + 1)
    assert taken["chosen"] and taken["generation"]["fits"] and not taken["generation"]["compiled"]
    assert taken["generation"]["description"] in plan_tables.report(taken)

    many = dataclasses.replace(long, eval=dataclasses.replace(long.eval, batch=64))
    fewer = planned(many, generation_memory.estimate(make_program(many), ROOM).peak_bytes - 1)
    assert fewer["chosen"] and not fewer["generation"]["fits"] and 1 <= fewer["generation"]["largest"] < 64
    assert f"--config.eval.batch={fewer['generation']['largest']} would" in plan_tables.report(fewer)


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
    rows = {row["strategy"]: row for row in found["candidates"]}
    assert rows[refused[0]]["obstacle"].startswith("validation of one example per device needs 1000.0 GB of ")
    assert found["chosen"]["strategy"] != refused[0] and found["validation"]["fits"]


@pytest.mark.slow
def test_what_is_clear_by_arithmetic_is_not_compiled(root):
    program, asked = make_program(tiny.make_config(root)), []

    def compile(lowered):
        asked.append(lowered)
        return memory.compile_here(lowered)

    found = planner.evaluation_memory(program, ROOM, compile)
    assert not asked and not any(one.compiled for one in found.values())
    doubled = 2 * max(one.peak_bytes for one in found.values()) - min(one.resident_bytes for one in found.values())
    for room, compiled in ((doubled, False), (doubled // 3, True)):
        found = planner.evaluation_memory(program, MemoryLimit(room, 1.0), compile)
        assert {one.compiled for one in found.values()} == {compiled}
    assert len(asked) >= 1 + 2 * 2, "validation, and each reader's answers and scores"
