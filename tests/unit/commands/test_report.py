"""The page of a run, from folders that the test writes; nothing of JAX is needed."""

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

import run
from lw_jax.core.errors import UserError
from lw_jax.evals import verdict
from lw_jax.report import device_use, records, tables
from lw_jax.report import page as pages
from tests.runs import between, evaluation, figures, metrics, predictions, write_lines, write_run

HOSTILE = '<script>alert("x")</script>'
MOST_BYTES = 3e6
VOID = {"meta", "link", "br", "img", "hr"}  # elements that need no end


class Reader(html.parser.HTMLParser):
    """Collects a page's texts, elements and attributes, and which elements were not closed in their order."""

    def __init__(self, page: str):
        super().__init__()
        self.source = page
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.faults.append(f"</{tag}> in {self.open}")

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, tag: str = "") -> str:
        return " ".join(data for at, data in self.texts if not tag or at == tag)

    def cells(self) -> list[str]:
        return [data for at, data in self.texts if at == "td"]


def write_evaluation(folder: Path, told: dict[str, Any]) -> None:
    (folder / "eval.json").write_text(json.dumps(told), encoding="utf-8")


def page_of(folder: Path) -> Reader:
    return Reader(pages.render(records.read(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, which the test may change."""
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return page_of(write_run(tmp_path_factory.mktemp("runs") / "mine"))


def test_page_has_every_section_and_closes_what_it_opens(page: Reader) -> None:
    assert not page.faults and not page.open
    assert [text for tag, text in page.texts if tag == "h1"] == ["mine"]
    assert [text for tag, text in page.texts if tag == "h2"] == list(pages.SECTIONS.values())
    assert {value for tag, name, value in page.attributes if (tag, name) == ("h2", "id")} == pages.SECTIONS.keys()
    labels = {value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")}
    assert all(any(word in label for label in labels) for word in ("training", "validation", "slots", "bytes"))
    assert "missing" not in [value for _, name, value in page.attributes if name == "class"]
    ids = [value for _, name, value in page.attributes if name == "id"]
    referred = {value[1:] for _, name, value in page.attributes if name == "href" and value[0] == "#"}
    assert referred <= set(ids) and len(set(ids)) == len(ids)
    assert "stage pretrain" in page.text("text") and "stage answer" in page.text("text")


def test_nothing_is_fetched_and_the_page_is_small(page: Reader) -> None:
    assert len(page.source.encode()) < MOST_BYTES
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    references = [
        value for _, name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "srcset")
    ]
    assert references and all(value.startswith(("#", "data:image/png;base64,")) for value in references)
    assert not re.search(r"https?:|@import|url\((?!#)", page.source)
    assert any("default-src 'none'" in value for tag, _, value in page.attributes if tag == "meta")


def test_control_table_shows_what_was_measured(page: Reader) -> None:
    cells = page.cells()
    start = cells.index("truncated")
    assert cells[start : start + 8] == [
        "truncated",
        "12.5",
        "10.0",
        "5.0 .. 10.0",
        "10.0",
        "5.0 .. 10.0",
        "2.700",
        "0.050 .. 0.100",
    ]
    assert cells[start + 13] == "23"
    assert {"91.3", "87.2", "31.0", "1.234", "1.134 .. 1.334", "4.250"} <= set(cells)
    assert {"the text, brotli", "89", "76", "message of 5 x 7 x 2", "32", "27"} <= set(cells)
    # Of which an evaluation takes eval.examples: the table says how many.
    assert "Validation examples: 23 of 29 can be used; 4 dropped" in page.text("p")


def test_settings_that_are_not_the_runs_stand_on_the_page(folder: Path) -> None:
    write_evaluation(folder, evaluation() | {"settings": {"max_new_tokens": 2, "taught_steps": 96}})
    assert "Measured with eval.max_new_tokens=2 (of the run: 16)." in page_of(folder).text("p")


def test_verdict_says_positions_speed_and_the_f1_of_message_and_controls(folder: Path) -> None:
    told = evaluation()
    told["readers"]["llama"] |= {"faster": 2.5, "timed_tokens": 211}
    told["rows"]["llama"]["latents"] |= {"first_token_seconds": 0.0417, "positions": 6.0}
    write_evaluation(folder, told)
    found = records.read(folder)
    for figure in ("6.0", "12.5", "2.50 times sooner", "211", "60.0 %"):
        assert figure in tables.verdicts(found)[-1].text, figure
    assert "41.7" in {row[0]: row[2] for row in tables.control(found.evaluation["rows"]["llama"]).rows}["latents"]
    assert "one of" not in tables.verdicts(found)[-1].text, "that is of kind cache"
    told["readers"]["llama"] |= {"faster": 0.5, "fewer_positions": 0.8, "timed_ratio": 4}
    write_evaluation(folder, told)
    slower = tables.verdicts(records.read(folder))[-1].text
    assert "1.25 times more" in slower and "2.00 times later" in slower and "a message of one of 4 positions" in slower


def test_shares_of_a_caches_rows_stand_in_the_verdict_and_the_comparison(folder: Path) -> None:
    told = evaluation()
    told["readers"] = {"llama": {"upper": "text", "normalised_f1_all": None, "normalised_f1_quarter": None}}
    told["readers"]["llama"] |= {f"normalised_f1_{row}_reason": "text is no better" for row in ("all", "quarter")}
    told["readers"]["llama"] |= {"recovered_nll_quarter": 0.9632, "recovered_nll_quarter_interval": [0.952, 0.973]}
    told["readers"]["llama"] |= {"bytes_a_token": 259.2, "write_seconds": 7.004, "open_seconds": 0.0391}
    write_evaluation(folder, told)
    found = records.read(folder)
    (line,) = tables.verdicts(found)
    assert "quarter 96.3 % (95.2 .. 97.3)" in line.text and line.text.count("text is no better") == 1
    table = tables.between(found.evaluation["readers"])
    unknown = ["unknown"] * 4
    assert table.rows == [["llama", "259", "7.00", "39.1", *unknown, "96.3", "95.2 .. 97.3"]]
    assert len(table.head) == len(table.rows[0])
    told = [record | {"row": "quarter"} for record in predictions() if record["row"] == "latents"]
    assert tables.shown_rows(told)[1] == "quarter" in tables.TITLES


def test_twenty_examples_are_spread_over_the_file_with_right_answers_marked(page: Reader) -> None:
    assert "20 of the 43 examples" in page.text("p")
    shown = [int(found) for found in re.findall(r"Question (\d+)\?", page.text("td"))]
    assert len(shown) == 20 and shown == sorted(shown) and shown[0] == 0 and shown[-1] == 3 * 40
    assert max(b - a for a, b in zip(shown, shown[1:], strict=False)) <= 3 * 3
    answers = [text.split() for tag, text in page.texts if tag == "td" and re.match("(latents|shuffled) ", text)]
    assert len(answers) == 20 * 2 * 2
    assert all((words[-1] == "✓") == (words[0] == "latents") for words in answers)
    assert page.text("span").count("F1 50 %") == 20 * 2


def test_hostile_text_is_shown_and_never_becomes_an_element(tmp_path: Path) -> None:
    folder = write_run(tmp_path / f"run{HOSTILE.replace('/', '')}", data__passages=HOSTILE)
    lines = predictions(3)
    for line in lines:
        line |= {"question": HOSTILE, "answers": [HOSTILE], "prediction": f'"{HOSTILE}\u2028&lt;b>'}
    write_lines(folder / "predictions.jsonl", lines)
    for name in records.TEXTS:
        (folder / name).write_text(f"</pre>{HOSTILE}", encoding="utf-8")
    told = evaluation()
    told["readers"] = {HOSTILE: between()}
    told["rows"] = {HOSTILE: {HOSTILE: figures(0.5)}}
    for point in told["curve"]["points"]:
        point["reader"] = HOSTILE
    write_evaluation(folder, told)
    page = page_of(folder)
    assert not page.faults and not page.open and "script" not in page.tags and "b" not in page.tags
    assert page.text("td").count("alert") == 3 * (1 + 1 + 2 * 3) + 1 + 1 + 4  # examples, and three tables
    assert page.text("text").count("alert") == 4 and HOSTILE in page.text("li")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("metrics.jsonl", "eval.json", "predictions.jsonl", "slots.json"), {"": 2, "eval": 5}),
        (("metrics.jsonl", "predictions.jsonl", "slots.json", "config.diff", "versions.json"), {"": 4, "eval": 2}),
        (("metrics.jsonl", "eval.json", *records.TEXTS), {"train": 5, "eval": 4}),
    ],
)
def test_what_is_missing_is_a_line_with_its_command(names, expected, folder: Path) -> None:
    for name in names:
        (folder / name).unlink()
    page = page_of(folder)
    assert not page.faults and not page.open and "step 0 of 30" in page.text("p")
    commands = {"": "python run.py --config 'my own.py'", "eval": f"python run.py eval --workdir {folder}"}
    commands["train"] = f"python run.py train --workdir {folder} --config FILE"
    told = [data for at, data in page.texts if at == "code"]
    assert {verb: sum(one.startswith(commands[verb]) for one in told) for verb in expected} == expected
    assert [value for _, key, value in page.attributes if key == "class"].count("missing") == sum(expected.values())
    if "slots.json" in names and "eval.json" in names:
        assert not {"svg", "figure", "th"} & set(page.tags), "nothing is drawn before the first step"


def test_commands_are_those_of_the_installed_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PROGRAM", "lw-jax")
    (folder / "command.txt").write_text("lw-jax --config configs/smoke.py\n", "utf-8")
    told = records.read(folder)
    assert (told.training, told.command("eval")) == (
        "lw-jax --config configs/smoke.py",
        f"lw-jax eval --workdir {folder}",
    )


def test_a_run_without_steps_has_no_curves_and_asks_for_no_training(tmp_path: Path) -> None:
    cache = {"encoder__kind": "cache", "encoder__source": "", "encoder__ratio": 2, "encoder__width": 60}
    folder = write_run(tmp_path / "run", train__steps=0, **cache)
    (folder / "metrics.jsonl").unlink()
    page = page_of(folder)
    assert [value for at, name, value in page.attributes if (at, name) == ("h2", "id")] == [
        *("positions", "controls", "examples", "made"),
    ]
    assert not page.faults and "training" not in page.text("p") and "step 0" not in page.text("p")


def test_figures_that_are_no_numbers_are_counted_and_left_out(folder: Path) -> None:
    rows = metrics()
    rows[4] |= {"train/loss": "nan", "train/nll/qwen": "inf"}
    for row in rows:
        row |= {"train/learning_rate": "-inf"} if "train/learning_rate" in row else {}
    write_lines(folder / "metrics.jsonl", rows)
    told = evaluation()
    told["curve"]["points"][0]["nll"] = None
    told["curve"]["references"]["llama"]["text"]["nll"] = None
    told["readers"]["llama"] |= {"normalised_f1": None, "normalised_f1_interval": None}
    told["rows"]["llama"]["zero"] |= {"nll": None, "nll_interval": None}
    write_evaluation(folder, told)
    page = page_of(folder)
    assert not page.faults and f"{30 + 2} logged values are not finite" in page.text("figcaption")
    assert "learning rate" not in page.text("text") and "loss" in page.text("text")
    assert "unknown" in page.text("td") and "nan" not in page.text("td").lower()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "carries"),
        ({"normalised_f1": 0.1}, "carries"),
        ({"normalised_f1": None, "recovered_nll": verdict.CARRIED}, "carries"),
        ({"normalised_f1": 0.59, "recovered_nll": 0.3}, "partly"),
        ({"normalised_f1_interval": [-0.2, 0.1]}, "carries"),
        ({"normalised_f1_interval": [-0.2, 1.5], "recovered_nll": 0.3}, "partly"),
        ({"normalised_f1_interval": [-0.2, 0.1], "recovered_nll_interval": [-0.4, -0.1]}, "useless"),
        ({"normalised_f1": None, "recovered_nll_interval": [-0.4, 0.1]}, "useless"),
        ({"own_f1": 0.59, "own_nll": 0.3}, "partly"),
        ({"own_f1": None, "own_nll": verdict.CARRIED}, "carries"),
        ({"own_f1": None, "own_nll_interval": [-0.1, 1.5]}, "partly"),
        ({"own_f1": None, "own_nll": None}, "partly"),
        ({"gap_nll_interval": [-0.01, 0.4]}, "collapsed"),
        ({"gap_nll_interval": [0.0, 0.4]}, "collapsed"),
        ({"gap_nll_interval": None}, "collapsed"),
        ({"normalised_f1": None, "recovered_nll": None}, "unknown"),
        ({"texts": verdict.FEWEST}, "carries"),
        ({"texts": verdict.FEWEST - 1}, "unknown"),
        ({"texts": 1, "gap_nll_interval": [0.0, 0.0]}, "unknown"),
    ],
)
def test_verdict_follows_the_thresholds(changes: dict[str, Any], key: str) -> None:
    assert verdict.judge(between(**changes)) == key


def test_verdicts_name_every_reader_the_worst_first(folder: Path) -> None:
    told = evaluation()
    told["readers"]["third"] = between(gap_nll=0.01, gap_nll_interval=[-0.2, 0.3])
    write_evaluation(folder, told)
    found = tables.verdicts(records.read(folder))
    assert [(one.key, one.text.split(":")[0]) for one in found] == [
        ("collapsed", "third"),
        ("partly", "qwen"),
        ("carries", "llama"),
    ]


def test_devices_are_summarised_over_all_processes(folder: Path) -> None:
    row = {"time": 1.0, "seconds": 1800.0, "device": "gpu0", "samples": 3, "utilisation": 0.5, "peak_bytes": 3e9}
    more = row | {"samples": 1, "utilisation": 0.9, "peak_bytes": 5e9, "limit_bytes": 8e9}
    write_lines(folder / "devices.jsonl", [row, more])
    write_lines(folder / "devices-1.jsonl", [row | {"device": "gpu1", "samples": 12, "utilisation": 0.2}])
    for name in ("metrics.jsonl", "eval.json", "slots.json"):  # nothing else is drawn
        (folder / name).unlink()
    cells = page_of(folder).cells()
    assert cells[cells.index("gpu0") :][:6] == ["gpu0", "1.00", "60.0", "50.0 .. 90.0", "5.0", "62"]
    assert cells[cells.index("gpu1") :][:6] == ["gpu1", "0.50", "20.0", "20.0 .. 20.0", "3.0", "unknown"]


def test_findings_are_of_the_devices_on_which_a_run_goes_on(folder: Path) -> None:
    left, here = device_rows((0.0, 31, 55), (0.9, 72, 55))
    write_lines(folder / "devices.jsonl", [left | {"time": 1.0}, here | {"time": 9.0}])
    (folder / "hardware.json").write_text(json.dumps({"devices": 1, "since_time": 5.0}), "utf-8")
    page = page_of(folder)
    assert "gpu0" in page.cells() and not {"under-used", "unbalanced"} & set(page.text("li").replace(":", "").split())


def device_rows(*devices: tuple[float, int | None, int], samples: int = 10) -> list[dict[str, Any]]:
    """A row of 10 s of each device: its utilisation, the share of its memory in percent, its temperature."""
    return [
        {"device": f"gpu{i}", "samples": samples, "seconds": 10.0, "utilisation": use, "celsius": celsius}
        | ({} if peak is None else {"peak_bytes": peak, "limit_bytes": 100})
        for i, (use, peak, celsius) in enumerate(devices)
    ]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (device_rows((0.92, 70, 55), (0.80, 75, 55)), []),
        (device_rows((0.41, 31, 55)), [r"under-used: gpu0 \(41%\).*train.micro_batch"]),
        (device_rows((0.41, 72, 55)), [r"under-used: gpu0 \(41%\).*checkpoints"]),
        (  # it went on on a larger card
            [*device_rows((0.41, 72, 55)), device_rows((0.41, 72, 55))[0] | {"limit_bytes": 200}],
            [r"under-used: gpu0 \(41%\).*checkpoints"],
        ),
        (device_rows((0.55, 60, 55), (0.41, None, 55)), [r"under-used: gpu1 \(41%\)"]),
        (device_rows((0.75, 60, 55), (0.93, 60, 55), (0.7, 60, 55)), ["unbalanced: .*gpu2 70%, gpu1 93%"]),
        (device_rows((0.9, 52, 55), (0.9, 90, 55)), ["unbalanced: .*gpu0 52%, gpu1 90%"]),
        (device_rows((0.9, 60, 84), (0.9, 60, 79), (0.8, 60, 84)), ["hot: gpu0 spent 10s"]),
        (device_rows((0.1, 31, 84), samples=9), []),
        (  # two devices in a start that failed, then one of them alone
            [*device_rows((0.1, 31, 55), (0.0, 31, 55), samples=1), *device_rows((0.41, 72, 55))],
            [r"under-used: gpu0 \(38%\).*checkpoints"],
        ),
    ],
)
def test_badly_used_devices_are_named(rows: list[dict[str, Any]], found: list[str]) -> None:
    for line, pattern in zip(device_use.findings(rows), found, strict=True):
        assert re.match(pattern, line)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("eval.json", '{"step": 3', "eval.json: "),
        ("eval.json", '{"step": 3}', "eval.json: .*validation"),
        ("predictions.jsonl", '{"reader": "llama"}\n', "predictions.jsonl: row 1: .*row"),
        ("config.json", "{}", "config.json: version=None"),
        ("slots.json", "[[1.0, 2.0]]", "slots.json: "),
    ],
)
def test_damaged_file_is_named(name: str, text: str, rule: str, folder: Path) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rule):
        records.read(folder)


def test_folder_that_is_no_run_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["report", "--workdir", str(tmp_path)]) == 2
    assert str(tmp_path / "config.json") in capsys.readouterr().err
    assert run.main(["report", "--config", "configs/smoke.py", "--workdir", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists() and not list(tmp_path.iterdir())
