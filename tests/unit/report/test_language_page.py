"""The page of a language model's run, from folders that the test writes: lw_jax.report.{language,scaling}.py."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lw_jax.report import language, records, scaling
from lw_jax.report import page as pages
from tests.language_runs import BATCH, LENGTH, LOSS, metrics, row_of, write_run
from tests.runs import write_lines
from tests.unit.commands.test_report import HOSTILE, page_of


def test_page_has_its_own_sections_in_order(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "mine"))
    assert not page.faults and not page.open
    sections = ["Curves", *language.SECTIONS.values(), pages.SECTIONS["made"]]
    assert [text for tag, text in page.texts if tag == "h2"] == sections
    ids = [value for at, name, value in page.attributes if (at, name) == ("h2", "id")]
    links = [value for at, name, value in page.attributes if (at, name) == ("a", "href")]
    assert links == [f"#{one}" for one in ids]
    assert "120 parameters" in page.text("p")
    cells = page.cells()
    start = cells.index("1")
    assert cells[start : start + 8] == ["1", "1", "4.000", "54.60", "2", "1", "3.500", "33.12"]


def test_verdict_is_the_last_loss_beside_counting_words(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    found = language.verdict(records.read(folder))
    figures = ("2.500", f"{math.exp(LOSS):.2f}", "3.250", "2.750")
    assert found.key == "carries" and all(figure in found.text for figure in figures)


@pytest.mark.parametrize("value", [2.8, "nan", 900.0])
def test_verdict_that_is_not_below_both_promises_nothing(value: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = metrics()
    rows[-1] |= {"validation/loss": value}
    write_lines(folder / "metrics.jsonl", rows)
    found = language.verdict(records.read(folder))
    assert found.key == "none"


def test_speed_is_the_median_of_the_log_together_and_a_device(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = records.read(folder)
    told = ("tokens/s, all devices", "4,000", "2,500 .. 5,500", "1,000 .. 7,000", "7")
    assert language.speed(run).rows[0] == told
    assert f"{BATCH * LENGTH} tokens a step" in language.tokens_a_step(run)
    row = {"time": 1.0, "seconds": 9.0, "samples": 3}
    uses = {"gpu0": 0.45, "gpu1": 0.5, "gpu2": 0.55, "gpu3": 0.5}
    rows = [row | {"device": name, "utilisation": use, "peak_bytes": 6e9} for name, use in uses.items()]
    write_lines(folder / "devices.jsonl", [*rows, rows[0] | {"samples": 1, "utilisation": 0.65}])
    run = records.read(folder)
    assert language.speed(run).rows[1][:2] == ("tokens/s a device, of 4", "1,000")
    timed = [row for row in run.metrics if "train/tokens_per_second" in row]
    (folder / "hardware.json").write_text(json.dumps({"devices": 2, "since_step": timed[-2]["step"]}))
    assert language.speed(records.read(folder)).rows[1][:2] == ("tokens/s a device, of 2", "3,500"), "of the last start"
    assert language.memory(run).rows[-1][:2] == ("peak", "6.00 GB")
    assert "50.0% .. 55.0%" in language.balance(run)
    write_lines(folder / "devices.jsonl", [*rows, rows[0] | {"time": 9.0, "utilisation": 0.9, "peak_bytes": 4e9}])
    (folder / "hardware.json").write_text(json.dumps({"devices": 1, "since_step": 35, "since_time": 5.0}))
    run = records.read(folder)
    assert [row["device"] for row in run.last_devices] == ["gpu0"]
    assert "the one device: 90.0%" in language.balance(run), "which the run has left are idle"
    assert language.memory(run).rows[-1][:2] == ("peak", "4.00 GB")


def test_memory_is_of_the_newest_checkpoint_and_of_the_step_that_is_this_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    table = language.memory(records.read(folder))
    assert table and [row[:2] for row in table.rows] == [("weights", "0.00 MB"), ("optimizer", "0.00 MB")]
    assert language._bytes(records.read(folder), "trainable/") == 4 * 70 + 2 * 50
    assert language._bytes(records.read(folder), "opt_state/") == 4 * 70 + 3
    other = [row_of("measured", "weak", 1, 5.0, **change) for change in ({"length": 48}, {"parameters": 9})]
    rows = [*other, row_of("planned", "strong", 1, 9.0, peak_bytes=8e9)]
    table = language.memory(records.read(write_run(folder, rows=rows)))
    assert table.rows[-1] == ("peak", "8.00 GB", "planned, 1 x h100, compiled")
    rows.append(row_of("measured", "strong", 2, 9.0, peak_bytes=5e9))
    table = language.memory(records.read(write_run(folder, rows=rows)))
    assert table.rows[-1] == ("peak", "5.00 GB", "measured, 2 x cpu, compiled")


@pytest.mark.parametrize("peak", [{}, {"peak_bytes": 6e9}])
def test_a_peak_that_devices_reported_is_not_called_unmeasured(peak: dict[str, float], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_lines(folder / "devices.jsonl", [{"device": "gpu0", "samples": 1, "seconds": 10.0} | peak])
    told = page_of(folder).text("p")
    assert "activations" in told.lower() and ("peak" in told) == (not peak)


@pytest.mark.parametrize(
    ("tokenizer", "vocab", "rows", "bound"),
    [("bytes", 0, 257, ", "), ("some/words", 300, 300, ", "), ("some/words", 0, 320, ", up to ")],
)
def test_padding_rows_are_no_parameters_where_the_vocabulary_is_known(
    tokenizer: str, vocab: int, rows: int, bound: str, tmp_path: Path
) -> None:
    own = {"ttt.tokenizer": tokenizer, "ttt.vocab": vocab, "ttt.table_multiple": 64, "ttt.width": 24}
    run = records.read(write_run(tmp_path / "run", changes=own))
    run = dataclasses.replace(run, leaves={"trainable/embed": ([320, 24], "float32")})
    assert language.describe(run).endswith(f"{bound}{rows * 24:,} parameters")


def test_folder_before_its_first_step_tells_every_command(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    for step in ("9", "70"):
        (folder / "checkpoints" / step / "record.json").unlink()
    page = page_of(folder)
    assert not page.faults and not page.open and "svg" not in page.tags
    told = page.text("code")
    assert told.count("python run.py --config 'my own.py' --config.train.steps=70") == 5
    assert language.parameters(records.read(folder)) == 0


def test_log_that_is_no_number_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = metrics()
    rows[2] |= {"train/loss": "nan", "train/tokens_per_second": "inf"}
    rows[-1] |= {"validation/nll/bigram": None, "validation/detail/position/2-2": "nan"}
    write_lines(folder / "metrics.jsonl", rows)
    page = page_of(folder)
    assert not page.faults and "4 logged values are not finite" in page.text("figcaption")
    cells = page.cells()
    assert cells[cells.index("tokens/s, all devices") + 4] == "6" and "nan" not in " ".join(cells).lower()
    assert cells[cells.index("2") : cells.index("2") + 4] == ["2", "1", "unknown", "unknown"]
    assert "bigram unknown: below" in page.text("li")


def test_measured_rows_stand_first_each_kind_against_its_own_single_device(tmp_path: Path) -> None:
    rows = [row_of("planned", "strong", count, 1000.0 * count, target="cpu") for count in (1, 2)]
    rows += [row_of("measured", "strong", count, rate) for count, rate in ((2, 60.0), (1, 50.0))]
    rows += [row_of("measured", "batch", 1, 50.0, mfu=0.125), row_of("planned", "length", 8, None, obstacle=HOSTILE)]
    run = records.read(write_run(tmp_path / "run", rows=rows))
    strong, _, batch = (table for _, table in scaling.tables(run))
    at = list(strong.head).index
    told = [(row[0], row[at("devices")], row[at("efficiency")]) for row in strong.rows]
    assert told[:2] == [("measured", "1", "100.0 %"), ("measured", "2", "60.0 %")]
    assert told[2:] == [("planned", "1", "100.0 %"), ("planned", "2", "100.0 %")]
    assert strong.muted == {2, 3} and "MFU" not in strong.head
    assert strong.rows[0][at("s/step")] == "19.2000 ±5 %"
    assert batch.rows[0][list(batch.head).index("MFU")] == "12.5 %"
    page = page_of(run.workdir)
    assert "virtual devices that share" in page.text("p") and "script" not in page.tags and HOSTILE in page.cells()
