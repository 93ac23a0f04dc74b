"""benchmarks/scaling.py plans and measures steps over devices and lengths; here small, on virtual CPU devices."""

import json

import pytest

from benchmarks import common, scaling
from benchmarks.scaling import Point
from lw_jax.core import environment
from lw_jax.core.errors import UserError
from lw_jax.report import folder_schema

LENGTH, BATCH = 32, 16
SIZES = {"layers": "1", "width": "24", "heads": "3", "ffn": "40", "length": str(LENGTH)}
CHANGES = {f"ttt.{name}": value for name, value in SIZES.items()} | {"train.global_batch": str(BATCH)}
WORDS = [f"--config.{path}={value}" for path, value in CHANGES.items()]


@pytest.fixture(scope="module")
def cfg():
    return common.load("configs/ttt/ttt_smoke.py", CHANGES)


@pytest.fixture(scope="module")
def planned(cfg):
    return scaling.plan_all(cfg, "h100x8", lengths=(LENGTH, 2 * LENGTH), estimate=True)


def test_weak_keeps_a_devices_batch_strong_the_whole_one_and_length_the_tokens():
    told = {"unit": "tokens", "length": 48, "global_batch": 40}
    found = scaling.points(told, 6, (16, 96))
    assert found == [
        *(Point("weak", count, 48, 5 * count) for count in (1, 2, 4)),
        *(Point("strong", count, 48, 40) for count in (1, 2, 4)),
        *(Point("length", 4, 16, 120), Point("length", 4, 96, 20)),
    ]
    assert {point.scaling for point in scaling.points(told | {"unit": "examples"}, 6, (16,))} == {"weak", "strong"}


@pytest.mark.parametrize(
    ("change", "lengths", "rule"),
    [({"global_batch": 12}, (48,), "multiple of 8"), ({}, (36,), "no equal number of windows for 8")],
)
def test_batch_or_length_that_cannot_be_divided_is_refused(change, lengths, rule):
    with pytest.raises(UserError, match=rule):
        scaling.points({"unit": "tokens", "length": 48, "global_batch": 40} | change, 8, lengths)


def test_planned_rows_hold_the_batch_that_their_scaling_names(planned):
    assert all(folder_schema.Scaling.__required_keys__ - {"config"} <= row.keys() for row in planned)
    told = [(row["scaling"], row["devices"], row["length"], row["global_batch"]) for row in planned]
    assert told[:4] == [("weak", n, LENGTH, 2 * n) for n in (1, 2, 4, 8)]
    assert told[4:8] == [("strong", n, LENGTH, BATCH) for n in (1, 2, 4, 8)]
    assert told[8:] == [("length", 8, LENGTH, BATCH), ("length", 8, 2 * LENGTH, BATCH // 2)]
    assert {(row["kind"], row["target"], row["peak_from"]) for row in planned} == {("planned", "h100", "arithmetic")}
    for row in planned:
        assert row["micro_batch"] * row["accumulation"] * row["devices"] == row["global_batch"]
        assert row["tokens_per_second"] == pytest.approx(row["global_batch"] * row["length"] / row["step_seconds"])
        assert row["weights_bytes"] == 4 * row["parameters"] and row["strategy"] == "replicate"
    weak = [row["tokens_per_second"] for row in planned if row["scaling"] == "weak"]
    assert weak[1] < weak[2] < weak[3] < 8 * weak[0]  # gradients are exchanged
    peaks = {row["devices"]: row["peak_bytes"] for row in planned if row["scaling"] == "strong"}
    assert peaks[8] < peaks[1]


def test_rows_of_the_same_kind_scaling_and_card_are_replaced_and_all_others_stay(tmp_path):
    old: list[scaling.Row] = [dict(zip(scaling.KEY, key.split(), strict=True)) | {"old": True} for key in KEYS]
    scaling.write(tmp_path / "run", old)
    new: scaling.Row = dict(zip(scaling.KEY, KEYS[1].split(), strict=True))
    scaling.write(tmp_path / "run", [new])
    assert json.loads((tmp_path / "run" / "scaling.json").read_text("utf-8")) == [old[0], old[2], old[3], new]


KEYS = ("planned weak h100", "measured weak h100", "measured strong h100", "measured weak h200")


@pytest.mark.parametrize("text", ["[", "[3]", '[{"kind": "planned"}]'])
def test_damaged_file_is_named_and_kept(text, tmp_path):
    (tmp_path / "scaling.json").write_text(text, "utf-8")
    with pytest.raises(UserError, match=r"scaling.json: .*remove it"):
        scaling.write(tmp_path, [])
    assert (tmp_path / "scaling.json").read_text("utf-8") == text


def test_command_writes_planned_and_measured_rows_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "prepare_compiler", lambda **_: None)
    monkeypatch.setattr(environment, "reserve_memory", lambda: None)
    monkeypatch.setattr(scaling, "points", lambda told, devices, lengths: [Point("weak", 2, told["length"], 4)])

    def child(words):
        capsys.readouterr()
        assert scaling.main(words) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(scaling, "_child", child)
    common = ["--config", "configs/ttt/ttt_smoke.py", *WORDS, "--workdir", str(tmp_path), "--steps", "2"]
    assert scaling.main([*common, "--planned", "h100x2", "--estimate"]) == 0
    assert "planned, h100" in capsys.readouterr().out
    assert scaling.main([*common, "--measured"]) == 0
    assert "measured, cpu" in capsys.readouterr().out
    rows = json.loads((tmp_path / "scaling.json").read_text("utf-8"))
    assert [(row["kind"], row["devices"], row["config"]) for row in rows] == [
        ("planned", 2, "configs/ttt/ttt_smoke.py"),
        ("measured", 2, "configs/ttt/ttt_smoke.py"),
    ]
