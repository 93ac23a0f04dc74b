"""The page of a language model's run, from folders that the test writes: lw_jax.report.{language,scaling}.py."""

import math
from pathlib import Path
from typing import Any

import pytest

from lw_jax.core.errors import UserError
from lw_jax.report import language, records, scaling
from lw_jax.report import page as pages
from tests.language_runs import BATCH, LENGTH, LOSS, metrics, row_of, write_run
from tests.runs import write_lines
from tests.unit.commands.test_report import HOSTILE, Reader, page_of


def classes_of(page: Reader, tag: str) -> list[str]:
    return [value for at, name, value in page.attributes if (at, name) == (tag, "class")]


def test_page_has_its_own_sections_in_order(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "mine"))
    assert not page.faults and not page.open
    sections = ["Curves", *language.SECTIONS.values(), pages.SECTIONS["made"]]
    assert [text for tag, text in page.texts if tag == "h2"] == sections
    ids = [value for at, name, value in page.attributes if (at, name) == ("h2", "id")]
    links = [value for at, name, value in page.attributes if (at, name) == ("a", "href")]
    assert links == [f"#{one}" for one in ids]
    drawn = page.text("text")
    for words in ("learning rate", "tokens/s", "held-out loss", "unigram", "bigram", "after the update", "perplexity"):
        assert words in drawn
    assert "TTT-Linear, transformer backbone" in page.text("p") and "120 parameters" in page.text("p")


def test_verdict_is_the_last_loss_beside_counting_words(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    found = language.verdict(records.read(folder))
    assert found.key == "carries" and found.text == (
        f"step 70: held-out loss 2.500 nats a token, perplexity {math.exp(LOSS):.2f}; baselines: unigram 3.250, "
        "bigram 2.750: below both"
    )


@pytest.mark.parametrize(("value", "told"), [(2.8, "not below"), ("nan", "loss unknown nats"), (900.0, "unknown;")])
def test_verdict_that_is_not_below_both_promises_nothing(value: Any, told: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = metrics()
    rows[-1] |= {"validation/loss": value}
    write_lines(folder / "metrics.jsonl", rows)
    found = language.verdict(records.read(folder))
    assert found.key == "none" and told in found.text


def test_rows_of_the_table_that_are_no_token_are_no_parameters(tmp_path: Path) -> None:
    run = records.read(write_run(tmp_path / "run", changes={"ttt.vocab": 8, "ttt.width": 7}))
    assert language.parameters(run) == 120 - (10 - 8) * 7
    assert "106 parameters" in language.describe(run)


def test_positions_are_in_their_order_with_perplexities(tmp_path: Path) -> None:
    cells = page_of(write_run(tmp_path / "run")).cells()
    start = cells.index("1")
    assert cells[start : start + 8] == ["1", "1", "4.000", "54.60", "2", "1", "3.500", "33.12"]
    last = cells.index("17-24")
    assert cells[last - 4 : last + 4] == ["9-16", "8", "2.000", "7.39", "17-24", "8", "1.500", "4.48"]


def test_speed_is_the_median_of_the_log_together_and_a_device(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    page = page_of(folder)
    cells = page.cells()
    start = cells.index("tokens/s, all devices")
    assert cells[start : start + 5] == ["tokens/s, all devices", "4,000", "2,500 .. 5,500", "1,000 .. 7,000", "7"]
    assert f"{BATCH} windows x {LENGTH} tokens = {BATCH * LENGTH} tokens a step" in page.text("p")
    assert "not recorded" in page.text("p") and "Not measured on this machine" in page.text("p")
    row = {"time": 1.0, "seconds": 9.0, "samples": 3}
    uses = {"gpu0": 0.45, "gpu1": 0.5, "gpu2": 0.55, "gpu3": 0.5}
    rows = [row | {"device": name, "utilisation": use, "peak_bytes": 6e9} for name, use in uses.items()]
    write_lines(folder / "devices.jsonl", [*rows, rows[0] | {"samples": 1, "utilisation": 0.65}])
    page = page_of(folder)
    assert "1,000" == page.cells()[page.cells().index("tokens/s a device, of 4") + 1]
    assert "Utilisation of 4 devices: 50.0% .. 55.0%, ±4.9% about their mean." in page.text("p")
    assert page.cells()[page.cells().index("peak") + 1] == "6.00 GB"


def test_memory_is_of_the_newest_checkpoint_and_of_the_step_that_is_this_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    table = language.memory(records.read(folder))
    assert table and [row[:2] for row in table.rows] == [("weights", "0.00 MB"), ("optimizer", "0.00 MB")]
    assert language._bytes(records.read(folder), "trainable/") == 4 * 70 + 2 * 50
    assert language._bytes(records.read(folder), "opt_state/") == 4 * 70 + 3
    other = [row_of("measured", "weak", 1, 5.0, **change) for change in ({"length": 48}, {"parameters": 9})]
    rows = [*other, row_of("planned", "strong", 1, 9.0, peak_bytes=8e9)]
    page = page_of(write_run(folder, rows=rows))
    start = page.cells().index("peak")
    assert page.cells()[start : start + 3] == ["peak", "8.00 GB", "planned, 1 x h100, compiled"]
    rows.append(row_of("measured", "strong", 2, 9.0, peak_bytes=5e9))
    page = page_of(write_run(folder, rows=rows))
    start = page.cells().index("peak")
    assert page.cells()[start : start + 3] == ["peak", "5.00 GB", "measured, 2 x cpu, compiled"]


def test_folder_before_its_first_step_tells_every_command(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    for step in ("9", "70"):
        (folder / "checkpoints" / step / "record.json").unlink()
    page = page_of(folder)
    assert not page.faults and not page.open and "svg" not in page.tags
    assert "no validation yet" in page.text("li")
    told = page.text("code")
    assert told.count("python run.py --config 'my own.py' --config.train.steps=70") == 5
    make = f"python benchmarks/scaling.py --config 'my own.py' --config.train.steps=70 --workdir {folder}"
    assert f"{make} --measured" in told and f"{make} --planned h100x8" in told
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


def test_planned_rows_are_muted_and_what_was_not_measured_is_told(tmp_path: Path) -> None:
    rows = [row_of("planned", "weak", count, 100.0 * count**0.5) for count in (1, 2, 4)]
    page = page_of(write_run(tmp_path / "run", rows=rows))
    assert classes_of(page, "tr") == ["planned"] * 3
    cells = page.cells()
    assert "70.7 %" in cells and "50.0 %" in cells and "100.0 %" in cells
    text = page.text("p")
    assert "Not measured yet (weak scaling, strong scaling, window length):" in text
    assert "Not planned yet (strong scaling, window length):" in text and "virtual" not in text


def test_measured_rows_stand_first_each_kind_against_its_own_single_device(tmp_path: Path) -> None:
    rows = [row_of("planned", "strong", count, 1000.0 * count, target="cpu") for count in (1, 2)]
    rows += [row_of("measured", "strong", count, rate) for count, rate in ((2, 60.0), (1, 50.0))]
    rows += [row_of("measured", "batch", 1, 50.0, mfu=0.125), row_of("planned", "length", 8, None, obstacle=HOSTILE)]
    run = records.read(write_run(tmp_path / "run", rows=rows))
    (strong, _, batch) = scaling.tables(run)
    at = list(strong.table.head).index
    told = [(row[0], row[at("devices")], row[at("efficiency")]) for row in strong.table.rows]
    assert told[:2] == [("measured", "1", "100.0 %"), ("measured", "2", "60.0 %")]
    assert told[2:] == [("planned", "1", "100.0 %"), ("planned", "2", "100.0 %")]
    assert strong.table.muted == {2, 3} and "MFU" not in strong.table.head
    assert strong.table.rows[0][at("s/step")] == "19.2000 ±5 %"
    assert batch.table.rows[0][list(batch.table.head).index("MFU")] == "12.5 %"
    page = page_of(run.workdir)
    assert "virtual devices that share" in page.text("p") and "script" not in page.tags and HOSTILE in page.cells()


def test_hostile_text_never_becomes_an_element(tmp_path: Path) -> None:
    rows = [row_of("measured", "weak", 1, 3.0, target=HOSTILE, config=HOSTILE)]
    folder = write_run(tmp_path / "run", rows=rows, changes={"ttt.tokenizer": HOSTILE})
    (folder / "command.txt").write_text(f"run.py --config '{HOSTILE}'", "utf-8")
    page = page_of(folder)
    assert not page.faults and not page.open and "script" not in page.tags
    assert HOSTILE in page.cells() and HOSTILE in page.text("code")


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("scaling.json", "{}", "scaling.json: expected array"),
        ("scaling.json", '[{"kind": "planned"}]', "scaling.json: .*missing required field scaling"),
        ("checkpoints/70/record.json", '{"record": {}}', "record.json: .*missing required field leaves"),
    ],
)
def test_damaged_file_is_named(name: str, text: str, rule: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(text, "utf-8")
    with pytest.raises(UserError, match=rule):
        pages.render(records.read(folder))
