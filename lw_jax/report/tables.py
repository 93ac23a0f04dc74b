"""Tables of an evaluation as text cells, ready for a page."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lw_jax.core.eval_rows import ROWS
from lw_jax.data.example_counts import REASONS
from lw_jax.evals import verdict
from lw_jax.evals.curve import COLUMNS, Curve
from lw_jax.report.records import Run, to_number

TITLES = {  # of rows in the examples
    "text": "from the text",
    "text_taught": "from the text, the form of the answer taught",
    "latents": "from its latents",
    "shuffled": "from another text's latents",
}
HEADLINE = ("latents", "shuffled", "random", "none")  # rows whose F1 a page says first
EXAMPLES = 20
LONGEST = 600  # characters of a question or an answer in the examples
BETWEEN = {  # of `control_rows.compare`: name -> (label, unit, factor)
    "normalised_f1": ("normalised F1", "%", 100),
    "recovered_nll": ("recovered NLL", "%", 100),
    "gap_f1": ("gap of F1", "points", 100),
    "gap_nll": ("gap of NLL", "nats a token", 1),
    "follows": ("follows a changed message, of changed texts followed", "%", 100),
}
GEOMETRY = {
    "inputs": "texts",
    "effective_rank": "effective rank over texts, centred",
    "effective_rank_uncentred": "effective rank, not centred",
    "input_cosine": "mean cosine between texts, slot by slot",
    "slot_cosine": "mean cosine between slots of a text",
}
DEVICE = {  # of devices.jsonl: name -> (heading, factor)
    "utilisation": ("utilisation, %", 100),
    "memory_bytes": ("memory, GB", 1e-9),
    "card_bytes": ("memory of all processes, GB", 1e-9),
    "celsius": ("temperature, °C", 1),
    "watts": ("power, W", 1),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Text cells; the columns after the first hold numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    muted: frozenset[int] = frozenset()  # rows that were not measured
    text_columns: frozenset[int] = frozenset()  # text columns after the first


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One line of the verdict."""

    key: str  # of verdict.WORDS, or "none": nothing was evaluated
    text: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """A reader's answer."""

    text: str
    mark: str  # "right" | "partly" | "wrong"
    f1: str


@dataclasses.dataclass(frozen=True)
class Shown:
    """One example with every reader's answers in the order of `shown_rows`; None for a row that was not measured."""

    question: str
    references: str
    readers: dict[str, list[Answer | None]]


def verdicts(run: Run) -> list[Verdict]:
    """Returns a line for each reader, the worst first; one line before an evaluation."""
    if run.cfg.recipe == "dpo":
        return [_preference(run)]
    if not run.evaluation:
        return [Verdict("none", "no evaluation yet")]
    order = list(verdict.WORDS)
    found = []
    for reader, figures in run.evaluation["readers"].items():
        key = verdict.judge(figures)
        shown = [*_headline(run.evaluation["rows"].get(reader, {}), figures)]
        shown += [
            f"{what} {_number(figures[name], scale)} {unit} ({_interval(figures.get(f'{name}_interval'), scale)})"
            for name, (what, unit, scale) in BETWEEN.items()
            if figures.get(name) is not None
        ]
        reasons = [f"{name}: {figures[f'{name}_reason']}" for name in BETWEEN if figures.get(f"{name}_reason")]
        found.append(Verdict(key, f"{reader}: {verdict.WORDS[key]}" + "; ".join(["", *shown, *reasons])))
    return sorted(found, key=lambda one: -order.index(one.key))


def _headline(rows: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the message's reader positions beside the text's, its speed, and F1 of text, message and controls."""
    upper = figures.get("upper", "text")
    held = {name: rows[name]["positions"] for name in ("latents", upper) if rows.get(name, {}).get("positions")}
    if len(held) == 2 and figures.get("fewer_positions"):
        yield (
            f"{held['latents']:,.1f} reader positions in place of {held[upper]:,.1f}, "
            f"{_times(figures['fewer_positions'], 'fewer', 'more')}"
        )
    if figures.get("faster"):
        speed = _times(figures["faster"], "sooner", "later")
        yield f"first answer token {speed} than from {figures['timed_tokens']} tokens"
    scores = [f"{name} {_number(rows[name]['f1'], 100)} %" for name in (upper, *HEADLINE) if name in rows]
    if scores:
        yield f"F1 of {', '.join(scores)}"


def _times(ratio: float, above: str, below: str) -> str:
    return f"{ratio:.2f} times {above}" if ratio >= 1 else f"{1 / ratio:.2f} times {below}"


def _preference(run: Run) -> Verdict:
    rows = [row for row in run.metrics if "validation/rewards/accuracies" in row]
    if not rows:
        return Verdict("none", "no validation yet")
    row = rows[-1]
    share, margin = (
        _number(row[f"validation/rewards/{name}"], scale) for name, scale in (("accuracies", 100), ("margins", 1))
    )
    return Verdict("none", f"step {row['step']}: held-out accuracy {share} %, mean margin {margin}")


def drawable_rows(readers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the rows with known positions and qualities that answer the same questions, by reader."""
    found = {
        reader: {
            row: figures
            for row, figures in rows.items()
            if not (row in ROWS and ROWS[row].swapped)
            and all(math.isfinite(to_number(figures.get(key))) for key in ("positions", "f1", "nll"))
        }
        for reader, rows in readers.items()
    }
    return {reader: rows for reader, rows in found.items() if rows}


def meanings(readers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns what a reader has in the place of the context, for each row that was measured."""
    measured = dict.fromkeys(row for rows in readers.values() for row in rows)
    return {row: ROWS[row].meaning for row in measured if row in ROWS}


def control(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns one reader's rows."""
    timed = any("first_token_seconds" in found for found in rows.values())
    head = [
        "row",
        "reader positions",
        *(["first answer token, ms"] if timed else []),
        "EM, %",
        "95 %",
        "F1, %",
        "95 %",
        "NLL, nats a token",
        "95 %",
    ]
    head += [
        "token accuracy, %",
        "first token, %",
        "95 %",
        "first token in top 5, %",
        "distinct answers, %",
        "examples",
    ]
    cells = []
    for row, found in rows.items():
        line = [row, f"{found['positions']:,.1f}" if found.get("positions") is not None else "unknown"]
        if timed:
            seconds = found.get("first_token_seconds")
            line.append("" if seconds is None else f"{1000 * seconds:,.1f}")
        for name, scale in (("em", 100), ("f1", 100), ("nll", 1)):
            line += [_number(found[name], scale), _interval(found[f"{name}_interval"], scale)]
        line += [_number(found["accuracy"], 100), _number(found["first_token"], 100)]
        line += [_interval(found["first_token_interval"], 100), _number(found["first_5"], 100)]
        cells.append([*line, _number(found["distinct"], 100), str(found["examples"])])
    return Table(head, cells)


def between(readers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns each reader's comparison of its rows."""
    head = [
        "reader",
        "fewer reader positions, x",
        *(cell for what, unit, _ in BETWEEN.values() for cell in (f"{what}, {unit}", "95 %")),
    ]
    cells = []
    for reader, figures in readers.items():
        line = [reader, _number(figures.get("fewer_positions"))]
        for name, (_, _, scale) in BETWEEN.items():
            line += [_number(figures.get(name), scale), _interval(figures.get(f"{name}_interval"), scale)]
        cells.append(line)
    return Table(head, cells)


def joint(found: Mapping[str, Any]) -> Table:
    """Returns the scores of joint and single answers."""
    named = {"joint (lowest mean NLL)": found["joint"], "oracle (best reader of each example)": found["oracle"]}
    named |= {f"{name} alone": figures for name, figures in found["readers"].items()}
    cells = []
    for name, figures in named.items():
        line = [name]
        for key in ("em", "f1"):
            line += [_number(figures[key], 100), _interval(figures[f"{key}_interval"], 100)]
        cells.append([*line, _number(figures["picked"], 100) if "picked" in figures else ""])
    return Table(["answer of", "EM, %", "95 %", "F1, %", "95 %", "picked, %"], cells)


def counts(found: Mapping[str, int]) -> str:
    """Returns how many held-out examples were used, and why others were dropped or cut."""
    reasons = [f"{number} {REASONS[name]}" for name, number in found.items() if number and name in REASONS]
    return "; ".join([f"{found.get('kept', 0)} of {found.get('given', 0)} used", *reasons])


def agreement(found: Mapping[str, Any]) -> str:
    """Returns the share of examples with equal answers."""
    share, span = _number(found["agreement"], 100), _interval(found["agreement_interval"], 100)
    return f"All readers agree, after normalisation, on {share} % ({span}) of {found['examples']} examples."


def geometry(found: Mapping[str, Any]) -> Table:
    """Returns rank and cosines of the latents."""
    head = ("of the latents", "value")
    return Table(head, [(text, _number(found.get(name))) for name, text in GEOMETRY.items()])


def points(curve: Curve) -> Table:
    """Returns the rows of bytes.csv."""
    names = [name for name in COLUMNS if any(name in point for point in curve.points)]
    names = ["reader", *(name for name in names if name != "reader")]
    return Table(names, [[_plain(point.get(name, "")) for name in names] for point in curve.points])


def sizes(curve: Curve) -> Table:
    """Returns the bytes of texts and messages, smallest first."""
    found = [(size, f"the text, {name}") for name, size in curve.text_bytes.items()]
    messages: dict[float, dict[str, None]] = {}
    for point in curve.points:
        text = f"{point['slots']:g} x {point['width']} x {point['bits']}"
        messages.setdefault(point["framed_bytes"], {})[text] = None
    found += [(size, "message of " + ", ".join(shapes)) for size, shapes in messages.items()]
    whole = curve.text_bytes["UTF-8"]
    return Table(
        ("sent (message: slots x values x bits)", "mean bytes", "of UTF-8, %"),
        [(text, f"{size:,.0f}", f"{100 * size / whole:,.0f}") for size, text in sorted(found)],
    )


def devices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns each device's utilisation, memory, temperature and power: mean, minimum and maximum of its samples."""
    names = [name for name in DEVICE if any(name in row for row in rows)]
    head = ["device", "hours", *(cell for name in names for cell in (DEVICE[name][0], "min .. max"))]
    head += ["peak memory, GB", "of the limit, %"]
    return Table(head, [_device(device, group, names) for device, group in by_device(rows).items()])


def by_device(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns each device's rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["device"], []).append(row)
    return groups


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Returns the sample-weighted mean of the rows' means."""
    return sum(row[name] * row["samples"] for row in rows) / sum(row["samples"] for row in rows)


def _device(device: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    line = [device, f"{sum(row['seconds'] for row in rows) / 3600:.2f}"]
    for name in names:
        sampled, scale = [row for row in rows if name in row], DEVICE[name][1]
        if not sampled:
            line += ["unknown", ""]
            continue
        values = [row[name] * scale for row in sampled]
        line += [f"{mean_of(sampled, name) * scale:,.1f}", f"{min(values):,.1f} .. {max(values):,.1f}"]
    peak = max((row["peak_bytes"] for row in rows if "peak_bytes" in row), default=None)
    limit = max((row["limit_bytes"] for row in rows if "limit_bytes" in row), default=None)
    share = f"{100 * peak / limit:.0f}" if peak is not None and limit else "unknown"
    return [*line, "unknown" if peak is None else f"{peak / 1e9:,.1f}", share]


def shown_rows(predictions: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the rows whose answers stand side by side: the text, the message and its control, as measured."""
    measured = {record["row"] for record in predictions}
    return "text_taught" if "text_taught" in measured else "text", "latents", "shuffled"


def examples(predictions: Sequence[Mapping[str, Any]], rows: Sequence[str]) -> tuple[list[Shown], int]:
    """Returns up to EXAMPLES examples spread evenly over the file, and the file's number of examples."""
    grouped: dict[int, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for record in predictions:
        grouped.setdefault(record["index"], {})[record["reader"], record["row"]] = record
    found = list(grouped.values())
    count = min(EXAMPLES, len(found))
    return [_show(found[i * len(found) // count], rows) for i in range(count)], len(found)


def _show(records: Mapping[tuple[str, str], Mapping[str, Any]], rows: Sequence[str]) -> Shown:
    first = next(iter(records.values()))
    readers = dict.fromkeys(reader for reader, _ in records)
    return Shown(
        question=_cut(first["question"]),
        references=_cut(" | ".join(first["answers"])),
        readers={name: [_answer(records.get((name, row))) for row in rows] for name in readers},
    )


def _answer(record: Mapping[str, Any] | None) -> Answer | None:
    if record is None:
        return None
    f1 = to_number(record["f1"])
    mark = "right" if record["em"] else "partly" if f1 > 0 else "wrong"
    return Answer(_cut(record["prediction"]), mark, f"F1 {100 * f1:.0f} %" if mark == "partly" else "")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " …"


def _number(value: float | None, scale: float = 1) -> str:
    number = to_number(value) * scale
    if not math.isfinite(number):
        return "unknown"
    if isinstance(value, int):
        return f"{number:,.0f}"
    return f"{number:.1f}" if scale == 100 else f"{number:,.3f}"


def _interval(interval: Sequence[float] | None, scale: float = 1) -> str:
    return " .. ".join(_number(bound, scale) for bound in interval) if interval else "unknown"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if math.isfinite(value) and abs(value) < 100 else _number(value)
    return str(value)
