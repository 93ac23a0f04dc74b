"""lw_jax/benchmarking/prediction.py: what compiled programs say of absent cards; CPU devices stand in."""

import dataclasses
import re

import jax
import pytest

from lw_jax.benchmarking.prediction import Predicted
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus, hlo_counts, planner, roofline, workload
from lw_jax.planning.plans import StepCandidate, StepPlan
from tests import tiny

CHOSEN = StepCandidate(
    **{"strategy": "replicate", "mesh": "2x1", "data": 2, "model": 1, "devices_used": 2, "remat": "none"},
    **{"micro_batch": 2, "accumulation": 1, "step_seconds": 0.5, "peak_bytes": 7, "flops": 11.0, "moved_bytes": 13.0},
)
SINGLE = dataclasses.replace(CHOSEN, strategy="single", mesh="1x1")
H100 = gpus.CARDS["h100"]


def choose(monkeypatch, chosen, why=""):
    plan = StepPlan(target="h100x2", devices=2, per_host=2, compiled=True, chosen=chosen, why=why)
    monkeypatch.setattr(planner, "make", lambda cfg, target: plan)


@pytest.fixture
def stand_in(monkeypatch):
    """Compiles for the CPU, and plans what it is given; returns the programs that were compiled."""
    compiled = []

    def compile_here(lowered):
        compiled.append(lowered.compile())
        return compiled[-1]

    monkeypatch.setattr(gpus, "compile_devices", lambda target: jax.devices()[: target.devices])
    monkeypatch.setattr(gpus, "compile_lowered", compile_here)
    choose(monkeypatch, CHOSEN)
    return compiled


@pytest.fixture
def wire(root, stand_in):
    return Predicted(tiny.make_config(root, train__global_batch=4, eval__batch=3, eval__layers="auto"), "h100x2")


def test_step_is_what_the_plan_says_beside_the_data_sheet(wire):
    (row,) = wire.measure("step")
    work = workload.step_flops(wire.cfg)
    assert (row.predicted_seconds, row.seconds, row.samples_per_second) == (0.5, None, 8.0)
    assert row.flops == work and row.of_matmul == pytest.approx(work / (0.5 * 2 * H100.peak["tf32"]))
    assert (row.peak_bytes, row.peak_from, row.compiled_flops, row.compiled_bytes) == (7, "compiled", 11.0, 13.0)
    assert row.what == "4 samples = 2 a device x 2 x 1 accumulated, remat none, placement replicate 2x1"
    assert wire.cfg.eval.layers == "stacked", "settled as for devices that are here: CPU devices stand in"


def test_writing_is_predicted_from_its_own_program(wire, stand_in):
    (row,) = wire.measure("encode")
    (program,) = stand_in
    counted = hlo_counts.analyse(program.as_text())
    seconds = roofline.predict(counted, gpus.parse("h100x2")).total
    assert row.compiled_flops == counted.flops > 0
    assert row.compiled_bytes == counted.moved_bytes > 0
    assert row.predicted_seconds == seconds and row.samples_per_second == 4 / seconds, "3 texts, and one for the second"
    assert row.flops == workload.encode_flops(wire.recipe)
    # weights and texts of a device, and the latents that it makes
    learned = sum(leaf.size * 4 for leaf in jax.tree.leaves(wire.recipe.abstract.trainable["encoder"]))
    assert row.peak_bytes > learned


@pytest.mark.slow
def test_a_token_costs_the_difference_between_a_long_and_a_short_answer(root, stand_in, monkeypatch):
    choose(monkeypatch, SINGLE)
    alone = Predicted(tiny.make_config(root, eval__batch=3, eval__max_new_tokens=5), "h100x1")
    rows = alone.measure("answer")
    assert [row.subject for row in rows] == ["llama", "qwen"]
    for row, whole, short in zip(rows, stand_in[0::2], stand_in[1::2], strict=True):
        one, other = (
            roofline.predict(hlo_counts.analyse(p.as_text()), gpus.parse("h100x1")).total for p in (whole, short)
        )
        assert hlo_counts.analyse(whole.as_text()).flops > hlo_counts.analyse(short.as_text()).flops, (
            "loops are counted"
        )
        assert row.predicted_seconds == one > other
        assert row.of_bandwidth == pytest.approx(row.bytes / ((one - other) / 4) / H100.bandwidth)
        assert f"a token of all {(one - other) / 4 * 1e3:.1f} ms" in row.what
        assert row.tokens_per_second == pytest.approx(3 * 5 / one)


@pytest.mark.slow
def test_a_message_as_keys_and_values_is_not_computed(root, stand_in, monkeypatch):
    choose(monkeypatch, SINGLE)
    cfg = tiny.make_config(root, only="llama", adapter__kind="kv", encoder__slots=64)
    predicted = Predicted(cfg, "h100x1")
    text, message = predicted.measure("prefill")
    assert text.predicted_seconds and message.predicted_seconds and text.compiled_flops > message.compiled_flops
    _, positions, computed = map(int, re.findall(r"\d+", message.what)[:3])
    before = predicted.recipe.validation_widths()["readers"]["llama"]["before"]["ids"].shape[0]
    assert positions - computed == 64 + before


def test_a_language_model_has_a_step_alone(tmp_path, stand_in):
    language = Predicted(tiny.make_ttt_config(tmp_path), "h100x2")
    assert language.parts == ["step"]
    (row,) = language.measure("step")
    assert row.tokens_per_second == pytest.approx(row.samples_per_second * (language.recipe.unit[1]))


def test_files_cannot_be_timed_on_an_absent_card(wire):
    with pytest.raises(UserError, match=r"--parts load: .* has step, encode, prefill, answer on .*absent"):
        wire.measure("load")


def test_nothing_fits_is_told_with_the_plans_reason(root, stand_in, monkeypatch):
    choose(monkeypatch, None, "nothing fits: single 1x1: too large")
    with pytest.raises(UserError, match="--target h100x2: nothing fits: single 1x1: too large"):
        Predicted(tiny.make_config(root), "h100x2")


def test_peaks_are_those_of_the_narrowest_arithmetic(root, stand_in):
    cfg = tiny.make_config(root)
    readers = {name: dataclasses.replace(llm, weights="bf16") for name, llm in cfg.llms.items()}
    narrow = dataclasses.replace(cfg, llms=readers)
    found = [Predicted(one, "h100x2").ceilings for one in (cfg, narrow)]
    assert [one.matmul for one in found] == [H100.peak["tf32"], H100.peak["bf16"]]
    assert {one.bandwidth for one in found} == {H100.bandwidth}
