"""benchmarks/scaling.py plans and measures steps over devices and lengths; here small, on virtual CPU devices."""

import dataclasses
import json

import pytest

from benchmarks import common, scaling
from benchmarks.scaling import Point
from lw_jax.benchmarking import timing
from lw_jax.core import environment
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus
from lw_jax.report import scaling as report

LENGTH, BATCH = 32, 16
SIZES = {"layers": "1", "width": "24", "heads": "3", "ffn": "40", "length": str(LENGTH)}
CHANGES = {f"ttt.{name}": value for name, value in SIZES.items()} | {"train.global_batch": str(BATCH)}
WORDS = [f"--config.{path}={value}" for path, value in CHANGES.items()]


def test_weak_keeps_a_devices_batch_strong_the_whole_one_and_length_the_tokens():
    told = {"unit": "tokens", "length": 48, "global_batch": 40}
    found = scaling.points(told, 6, (16, 96))
    assert found == [
        *(Point("weak", count, 48, 5 * count) for count in (1, 2, 4)),
        *(Point("strong", count, 48, 40) for count in (1, 2, 4)),
        *(Point("length", 4, 16, 120), Point("length", 4, 96, 20)),
    ]
    assert {point.scaling for point in scaling.points(told | {"unit": "examples"}, 6, (16,))} == {"weak", "strong"}


def test_planned_nodes_are_those_of_the_target():
    cfg, point = common.load("configs/ttt/ttt_smoke.py", CHANGES), Point("weak", 8, LENGTH, BATCH)
    one, two = (scaling.plan(cfg, gpus.parse(word), point, estimate=True) for word in ("h100x8", "2xh100x4"))
    assert (one["target"], two["target"]) == ("h100", "h100, 4 a node")
    assert two["step_seconds"] > one["step_seconds"], "the network is slower than NVLink"
    alone = scaling.plan(cfg, gpus.parse("2xh100x4"), Point("weak", 1, LENGTH, BATCH // 8), estimate=True)
    assert report.efficiency(two | {"config": ""}, [alone | {"config": ""}]) is not None
    with pytest.raises(UserError, match="whole nodes of 6"):
        scaling.plan(cfg, gpus.parse("2xh100x6"), point, estimate=True)


@pytest.mark.parametrize(("dtype", "peak"), [("fp32", "tf32"), ("bf16", "bf16")])
def test_mfu_is_of_the_peak_of_the_runs_own_arithmetic(dtype, peak, monkeypatch):
    monkeypatch.setattr(gpus, "of_device", lambda device: gpus.CARDS["h100"])
    monkeypatch.setattr(timing, "ceilings", lambda name: timing.Ceilings(name, 1e12, 1e12))
    point = dataclasses.asdict(Point("batch", 1, LENGTH, 2, 2))
    words = CHANGES | {"compute.dtype": dtype, "mesh.placement": "single", "compute.remat": "none"}
    row = scaling.measure("configs/ttt/ttt_smoke.py", words, point, steps=1)
    reached = row["of_matmul"] * 1e12 / gpus.CARDS["h100"].peak[peak]
    assert row["mfu"] == pytest.approx(reached)


@pytest.mark.slow
def test_command_writes_planned_and_measured_rows_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "prepare_compiler", lambda **_: None)
    monkeypatch.setattr(scaling, "points", lambda told, devices, lengths: [Point("weak", 2, told["length"], 4)])

    def here(place, **words):  # in this process, on its virtual devices
        script, name = place.split(".")
        assert script == "scaling"
        return json.loads(json.dumps(getattr(scaling, name)(**json.loads(json.dumps(words)))))

    monkeypatch.setattr(common, "apart", here)
    shared = ["--config", "configs/ttt/ttt_smoke.py", *WORDS, "--workdir", str(tmp_path), "--steps", "2"]
    assert scaling.main([*shared, "--planned", "h100x2", "--estimate"]) == 0
    assert "planned, h100" in capsys.readouterr().out
    assert scaling.main([*shared, "--measured"]) == 0
    assert "measured, cpu" in capsys.readouterr().out
    rows = json.loads((tmp_path / "scaling.json").read_text("utf-8"))
    assert [(row["kind"], row["devices"], row["config"]) for row in rows] == [
        ("planned", 2, "configs/ttt/ttt_smoke.py"),
        ("measured", 2, "configs/ttt/ttt_smoke.py"),
    ]
