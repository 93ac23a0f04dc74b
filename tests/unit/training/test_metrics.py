"""Metrics files survive a crash and a resumption; the clock leaves compilation out."""

import json
import math
import os
import tracemalloc

import msgspec
import pytest

from lw_jax.core import schema
from lw_jax.training import metrics, run_folder


def write(path, steps, **options):
    log = metrics.MetricsLog(path, **options)
    for step in steps:
        log.write(step, {"train/loss": step / 8})
    return [row["step"] for row in run_folder.read_metrics(path)]


def test_resumed_run_drops_what_it_will_do_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    assert write(path, [5, 6], resumed_step=4) == [1, 2, 3, 4, 5, 6]
    assert write(path, [1]) == [1], "a new run begins anew"


def test_log_of_a_finished_run_that_is_started_again_keeps_the_time_of_its_last_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    os.utime(path, (7, 7))
    metrics.MetricsLog(path, resumed_step=3)
    assert path.stat().st_mtime == 7


def test_last_line_cut_by_a_crash_is_left_out_and_written_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    path.write_text(path.read_text()[:-9])
    assert [row["step"] for row in run_folder.read_metrics(path)] == [1, 2]
    assert write(path, [3, 4], resumed_step=2) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "line", [b'{"st', b"5", b'{"a": 1}', b'{"step": 3, "a": {}}', b'{"step": 3, "a": "\xff"}', b"[" * 9999]
)
def test_damaged_line_is_named_and_skipped_and_the_rest_is_kept(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[3:], b""]))
    assert [row["step"] for row in run_folder.read_metrics(path)] == [1, 2, 4, 5]
    assert f"{path}:3: " in caplog.text
    assert write(path, [5, 6], resumed_step=4) == [1, 2, 4, 5, 6]
    assert len(caplog.records) == 2, "the file is mended by then"


def test_step_that_is_validated_again_loses_its_validation_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    for step in (1, 2, 3):
        log.write(step, {"train/loss": 0.5})
        log.write(step, {"validation/loss": 0.5})
    metrics.MetricsLog(path, resumed_step=2, revalidate=True)
    kept = [(1, "train/loss"), (1, "validation/loss"), (2, "train/loss")]
    assert [(row["step"], name) for row in run_folder.read_metrics(path) for name in row if name != "step"] == kept


def test_long_log_is_read_line_by_line_and_its_type_is_worked_out_once(tmp_path, monkeypatch):
    path, made, decoder = tmp_path / "metrics.jsonl", [], msgspec.json.Decoder
    row = {f"train/figure {number}": number / 7 for number in range(20)}
    path.write_text("".join(json.dumps({"step": step} | row) + "\n" for step in range(1, 2000)))
    monkeypatch.setattr(msgspec.json, "Decoder", lambda kind: made.append(kind) or decoder(kind))
    schema._decoder.cache_clear()
    tracemalloc.start()
    metrics.MetricsLog(path, resumed_step=1998)
    peak, size = tracemalloc.get_traced_memory()[1], path.stat().st_size
    tracemalloc.stop()
    assert peak < 4 * size, "its lines, the new text and the old one"
    assert len(made) == 1
    assert len(run_folder.read_metrics(path)) == 1998


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")])
def test_what_json_cannot_say_is_written_as_a_word(tmp_path, value, text):
    path = tmp_path / "metrics.jsonl"
    metrics.MetricsLog(path).write(1, {"train/loss": value})

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {"step": 1, "train/loss": text}


def test_clock_leaves_compilation_and_validation_out_and_claims_no_pace_where_no_step_passed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    clock = metrics.Clock(20, 60)
    now[0] += 50
    assert clock.compiled(21) == 50
    now[0] += 3
    assert all(math.isnan(value) for value in clock.lap(21))
    with clock.paused():
        now[0] += 500
    now[0] += 5
    assert clock.lap(25) == (2.0, 2.0 * 35), "the seconds before the empty lap count"
    now[0] += 20
    assert clock.lap(30) == (4.0, 28 / 9 * 30)  # this lap's pace; the time left by the average
