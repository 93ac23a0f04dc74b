"""Plans of runs without steps: memory, seconds, the job; of two tiny readers and of 8B ones."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import pytest

from configs import pair_8b
from lw_jax.benchmarking import timing
from lw_jax.core import config, validation
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus, hardware, host_memory, plan_tables, planner, simulation, start_plan
from lw_jax.planning.roofline import Speed
from tests import tiny

CACHE = {"encoder__kind": "cache", "encoder__ratio": 4, "encoder__width": 200, "encoder__texts": 24, "train__steps": 0}


@pytest.fixture(scope="module")
def large():
    """Llama-3.1-8B and Qwen2.5-7B on one H100, by arithmetic."""
    return start_plan.of_target(config.build(pair_8b.get_config()), "h100x1", estimate=True)


def test_two_readers_of_8b_start_on_one_card_of_80_gb(large):
    best = large.chosen
    assert best is not None and (best.strategy, best.mesh) == ("single", "1x1")
    llama, qwen = best.readers["llama"], best.readers["qwen"]
    assert llama.weights_bytes == pytest.approx(16.06e9, rel=0.01)  # 8.03 billion in bf16
    assert llama.code_bytes == pytest.approx(pair_8b.get_config().encoder.width * 2 * 32 * 8 * 128 * 4, rel=0.01)
    assert llama.text_bytes == 1000 * 2 * 32 * 8 * 128 * 2 and llama.message_bytes == llama.text_bytes // 4
    assert llama.weights_bytes + qwen.weights_bytes < best.peak_bytes < large.limit_bytes
    assert large.hours is not None and 0 < large.hours < 0.5
    assert llama.write_seconds > 2 * llama.read_seconds > 0


def test_reading_costs_two_flops_a_weight_and_token(large):
    weights = 8.03e9 - 2 * 128256 * 4096  # without embedding and head
    reading = large.chosen.readers["llama"].reading
    read = 2 * 2 * weights * large.rows * large.tokens
    assert read < reading.flops < 1.2 * read, "and the products of attention"


def test_report_and_flags_say_what_is_chosen(large):
    told = plan_tables.report(large)
    assert "chosen: single 1x1" in told and "--config.mesh.placement=single" in told and "ARITHMETIC ESTIMATE" in told
    assert "a text of 1,000 tokens: read in" in told
    values = pair_8b.get_config()
    values.update_from_flattened_dict(large.chosen.overrides())
    validation.validate(config.build(values))


def test_what_does_not_fit_takes_more_devices_or_says_so(large):
    small = config.build(pair_8b.get_config())
    found = start_plan.of_target(small, "a100_40x1", estimate=True)
    assert found.chosen is None and "of" in found.candidates[-1].obstacle and found.hours is None
    assert "nothing fits" in plan_tables.report(found)
    several = start_plan.of_target(small, "a100_40x8", estimate=True)
    assert several.chosen is not None and several.chosen.strategy == "tensor" and several.chosen.model > 1
    for name, split in several.chosen.readers.items():
        whole, data = large.chosen.readers[name], several.chosen.data
        assert split.reading.flops < 0.6 * whole.reading.flops / data, "a device reads its part of the model"
        coding = split.writing.flops - split.reading.flops
        assert coding == pytest.approx((whole.writing.flops - whole.reading.flops) / data, rel=0.02), "and codes all"


def test_training_over_a_model_axis_is_as_much_work_for_each_device(root):
    cfg = tiny.make_config(root, only="llama", **CACHE | {"train__steps": 5}, compute__remat="none")
    placed = {"h100x1": {"mesh__placement": "single"}, "h100x2": {"mesh__placement": "tensor", "mesh__model": 2}}
    one, two = (planner.make(tiny.change(cfg, **at), target, estimate=True) for target, at in placed.items())
    assert two.chosen.samples_per_second <= one.chosen.samples_per_second
    changed = simulation.changes(
        cfg, one.target, one.chosen, own={}, estimate=functools.partial(planner.make, estimate=True)
    )
    assert not any("latents" in change.what for change in changed), "it has none"


def test_a_run_with_steps_needs_room_and_time_for_its_start(root):
    changes = {"train__steps": 5, "train__global_batch": 1, "eval__batch": 1, "mesh__target_utilisation": 1.0}
    cfg = tiny.make_config(root, only="llama", **CACHE | changes, mesh__placement="single")
    ample = planner.make(cfg, "h100x1", estimate=True)
    alone = start_plan.of_target(tiny.change(cfg, train__steps=0), "h100x1", estimate=True)
    assert (ample.start_hours, ample.start_peak_bytes) == (alone.hours, alone.chosen.peak_bytes)
    assert 0.9 < ample.forward_share < 1.2, "what is written and measured has no backward pass"
    assert "for the start" in plan_tables.report(ample)
    more = planner.make(tiny.change(cfg, encoder__texts=24_000), "h100x1", estimate=True)
    assert more.start_hours > ample.start_hours and more.host_memory_bytes > ample.host_memory_bytes
    between = (max(ample.chosen.peak_bytes, ample.validation.peak_bytes) + ample.start_peak_bytes) / 2
    found = planner.make(tiny.change(cfg, mesh__memory_gb=between / 1e9), "h100x1", estimate=True)
    assert found.chosen is None and "start" in found.candidates[0].obstacle


def test_weights_that_a_program_does_not_read_take_nothing_from_its_peak(root):
    cfg = tiny.make_config(root, only="llama", **CACHE, mesh__placement="single")
    sizes = {"argument": 0, "temp": 7_000_000, "output": 1_000_000, "alias": 0}  # as of all arguments dropped
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    target = hardware.absent(cfg, gpus.parse("h100x1"), compiler=False)
    on = dataclasses.replace(target, compile=lambda _: SimpleNamespace(memory_analysis=lambda: analysis))
    plan = start_plan.make(cfg, on, None)
    assert plan.chosen is not None
    reader, text = plan.chosen.readers["llama"], plan.rows * plan.tokens * 5  # ids and mask
    assert 8_000_000 + text < reader.reading.peak_bytes < reader.writing.peak_bytes < 8_000_000 + 2 * text

    def refuse(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes")

    plan = start_plan.make(cfg, dataclasses.replace(target, compile=refuse), None)
    assert plan.chosen is None and "too large for the compiler" in plan.candidates[0].obstacle


def test_the_cpu_is_planned_by_compiling_and_as_json(root, capsys, monkeypatch):
    monkeypatch.setattr(timing, "WARM_SECONDS", 0.0)
    cfg = tiny.make_config(root, only="llama", **CACHE, mesh__placement="single")
    assert tiny.call("plan", cfg, root, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    reader = found["chosen"]["readers"]["llama"]
    assert found["target"] == "cpu" and found["compiled"] and found["hours"] > 0
    for part in ("reading", "writing"):
        assert 0.4 < reader[part]["estimate_bytes"] / reader[part]["peak_bytes"] < 2.5


@pytest.mark.parametrize("make", [lambda cfg: start_plan.of_cpu(cfg, Speed({}, 1, 1)), planner.plan_run])
@pytest.mark.parametrize("steps", [0, 5])
def test_devices_that_report_no_memory_need_it_configured(root, monkeypatch, make, steps):
    monkeypatch.setattr(host_memory, "available", lambda: None)
    cfg = tiny.make_config(root, only="llama", **CACHE | {"train__steps": steps}, mesh__memory_gb=0.0)
    with pytest.raises(UserError, match=r"mesh\.memory_gb = 0"):
        make(cfg)


def test_a_job_is_written_and_what_needs_steps_is_refused(tmp_path, monkeypatch, large, capsys):
    cfg = config.build(pair_8b.get_config())
    monkeypatch.setattr(start_plan, "of_target", lambda *_, **__: large)
    tiny.call("slurm", cfg, tmp_path, spec="configs/pair_8b.py", target="h100x1")
    script = (tmp_path / "job.sbatch").read_text("utf-8")
    assert "--gpus-per-node=1" in script and "--config.mesh.placement=single" in script
    assert "time limit" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"train\.steps = 0.*eval"):
        tiny.call("bench", cfg, tmp_path)
    with pytest.raises(UserError, match="--simulate 1,2"):
        tiny.call("plan", cfg, tmp_path, simulate="1,2")
