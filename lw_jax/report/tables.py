"""Tables of an evaluation as text cells, ready for a page."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lw_jax.core.eval_rows import OF_CACHE, ROWS
from lw_jax.data.example_counts import REASONS
from lw_jax.evals import verdict
from lw_jax.evals.results import COLUMNS, COMPARISON, MESSAGE, PLAIN, ROW, Column, Curve
from lw_jax.report.records import Run, to_number

TITLES = {  # of rows in the examples
    "text": "from the text",
    "text_taught": "from the text, the form of the answer taught",
    "latents": "from its latents",
    "shuffled": "from another text's latents",
} | {row: f"from its message, row {row}" for row in OF_CACHE}
HEADLINE = ("latents", *OF_CACHE, "shuffled", "random", "none")  # rows whose F1 a page says first
EXAMPLES = 20
GEOMETRY = {
    "inputs": "texts",
    "effective_rank": "effective rank over texts, centred",
    "effective_rank_uncentred": "effective rank, not centred",
    "input_cosine": "mean cosine between texts, slot by slot",
    "slot_cosine": "mean cosine between slots of a text",
}

Prediction = Mapping[str, Any]  # a row of predictions.jsonl
# A record, for the question, and by reader those of some rows; None for a row that was not measured.
Example = tuple[Prediction, dict[str, list[Prediction | None]]]


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


def verdicts(run: Run) -> list[Verdict]:
    """Returns a line for each reader, the worst first; one line before an evaluation."""
    if run.cfg.recipe == "dpo":
        return [_preference(run)]
    if not run.evaluation:
        return [Verdict("none", "no evaluation yet")]
    order = list(verdict.WORDS)
    lines = []
    for reader, figures in run.evaluation["readers"].items():
        key = verdict.judge(figures)
        shown = [*_headline(run.evaluation["rows"].get(reader, {}), figures)]
        for name, column in COMPARISON.items():
            if figures.get(name) is not None:
                value, span = _cells(figures, name, column)
                shown.append(f"{column.label} {value} {column.unit} ({span})")
        reasons: dict[str, str] = {}  # each with the first figure that it leaves unknown
        for name in COMPARISON:
            if reason := figures.get(f"{name}_reason"):
                reasons.setdefault(reason, name)
        shown += [f"{name}: {reason}" for reason, name in reasons.items()]
        lines.append(Verdict(key, f"{reader}: {verdict.WORDS[key]}" + "; ".join(["", *shown])))
    return sorted(lines, key=lambda line: -order.index(line.key))


def _headline(rows: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the message's reader positions beside the text's, its speed, and F1 of text, message and controls."""
    upper = figures.get("upper", "text")
    positions = {name: rows[name]["positions"] for name in ("latents", upper) if rows.get(name, {}).get("positions")}
    if len(positions) == 2 and figures.get("fewer_positions"):
        yield (
            f"{positions['latents']:,.1f} reader positions in place of {positions[upper]:,.1f}, "
            f"{_times(figures['fewer_positions'], 'fewer', 'more')}"
        )
    if figures.get("faster"):
        speed = _times(figures["faster"], "sooner", "later")
        message = f", from a message of one of {ratio} positions" if (ratio := figures.get("timed_ratio")) else ""
        yield f"first answer token {speed} than from {figures['timed_tokens']} tokens{message}"
    scores = [f"{name} {number(rows[name]['f1'], 100)} %" for name in (upper, *HEADLINE) if "f1" in rows.get(name, {})]
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
        number(row[f"validation/rewards/{name}"], scale) for name, scale in (("accuracies", 100), ("margins", 1))
    )
    return Verdict("none", f"step {row['step']}: held-out accuracy {share} %, mean margin {margin}")


def drawable_rows(readers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the rows with known positions and qualities that answer the same questions, by reader."""
    drawable = {
        reader: {
            row: figures
            for row, figures in rows.items()
            if not (row in ROWS and ROWS[row].swapped)
            and all(math.isfinite(to_number(figures.get(key))) for key in ("positions", "f1", "nll"))
        }
        for reader, rows in readers.items()
    }
    return {reader: rows for reader, rows in drawable.items() if rows}


def meanings(readers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns what a reader has in the place of the context, for each row that was measured."""
    measured = dict.fromkeys(row for rows in readers.values() for row in rows)
    return {row: ROWS[row].meaning for row in measured if row in ROWS}


def control(rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Column] = ROW) -> Table:
    return _compare("row", rows, _measured(columns, rows))


def between(readers: Mapping[str, Mapping[str, Any]]) -> Table:
    return _compare("reader", readers, _measured(MESSAGE | COMPARISON, readers))


def _measured(columns: Mapping[str, Column], named: Mapping[str, Mapping[str, Any]]) -> dict[str, Column]:
    return {name: column for name, column in columns.items() if any(name in figures for figures in named.values())}


def joint(found: Mapping[str, Any]) -> Table:
    named = {"joint (lowest mean NLL)": found["joint"], "oracle (best reader of each example)": found["oracle"]}
    named |= {f"{name} alone": figures for name, figures in found["readers"].items()}
    return _compare("answer of", named, {"em": ROW["em"], "f1": ROW["f1"], "picked": Column("picked", "%", 100)})


def _compare(first: str, named: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Column]) -> Table:
    """Returns a line for each name, with a cell for each column and one more for its interval where it has one."""
    head = [first]
    for column in columns.values():
        head += [column.heading, "95 %"] if column.interval else [column.heading]
    lines = []
    for name, figures in named.items():
        lines.append([name, *(cell for key, column in columns.items() for cell in _cells(figures, key, column))])
    return Table(head, lines)


def _cells(figures: Mapping[str, Any], name: str, column: Column) -> list[str]:
    """Returns a figure, empty where it was not measured, and its interval where it has one."""
    cells = [number(figures[name], column.scale, column.digits) if name in figures else ""]
    if column.interval:
        cells.append(_interval(figures.get(f"{name}_interval"), column.scale) if name in figures else "")
    return cells


def counts(numbers: Mapping[str, int]) -> str:
    reasons = [f"{count} {REASONS[name]}" for name, count in numbers.items() if count and name in REASONS]
    return "; ".join([f"{numbers.get('kept', 0)} of {numbers.get('given', 0)} can be used", *reasons])


def other_settings(run: Run) -> str:
    """Returns a sentence on settings of the evaluation that are not those of the run; empty where there are none."""
    measured = run.evaluation.get("settings", {})
    own = {name: getattr(run.cfg.eval, name) for name in measured}
    others = [f"eval.{name}={measured[name]} (of the run: {own[name]})" for name in own if measured[name] != own[name]]
    return f"Measured with {', '.join(others)}." if others else ""


def agreement(figures: Mapping[str, Any]) -> str:
    share, span = number(figures["agreement"], 100), _interval(figures["agreement_interval"], 100)
    return f"All readers agree, after normalisation, on {share} % ({span}) of {figures['examples']} examples."


def geometry(figures: Mapping[str, Any]) -> Table:
    head = ("of the latents", "value")
    return Table(head, [(text, number(figures.get(name))) for name, text in GEOMETRY.items()])


def points(curve: Curve) -> Table:
    names = [name for name in COLUMNS if any(name in point for point in curve.points)]
    names = ["reader", *(name for name in names if name != "reader")]
    return Table(names, [[_plain(point.get(name, "")) for name in names] for point in curve.points])


def sizes(curve: Curve) -> Table:
    rows = [(size, f"the text, {name}") for name, size in curve.text_bytes.items()]
    messages: dict[float, dict[str, None]] = {}
    for point in curve.points:
        text = f"{point['slots']:g} x {point['width']} x {point['bits']}"
        messages.setdefault(point["framed_bytes"], {})[text] = None
    rows += [(size, "message of " + ", ".join(shapes)) for size, shapes in messages.items()]
    whole = curve.text_bytes[PLAIN]
    return Table(
        ("sent (message: slots x values x bits)", "mean bytes", "of UTF-8, %"),
        [(text, f"{size:,.0f}", f"{100 * size / whole:,.0f}") for size, text in sorted(rows)],
    )


def shown_rows(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """Returns the rows whose answers stand side by side: the text, the message and its control, as measured."""
    measured = {record["row"] for record in predictions}
    sent = next((row for row in ("latents", *OF_CACHE) if row in measured), "latents")
    return "text_taught" if "text_taught" in measured else "text", sent, "shuffled"


def examples(predictions: Sequence[Prediction], rows: Sequence[str]) -> tuple[list[Example], int]:
    """Returns up to EXAMPLES examples spread evenly over the file, and the file's number of examples."""
    grouped: dict[int, dict[str, dict[str, Prediction]]] = {}
    for record in predictions:
        grouped.setdefault(record["index"], {}).setdefault(record["reader"], {})[record["row"]] = record
    groups = list(grouped.values())
    count = min(EXAMPLES, len(groups))
    return [_show(groups[i * len(groups) // count], rows) for i in range(count)], len(groups)


def _show(readers: Mapping[str, Mapping[str, Prediction]], rows: Sequence[str]) -> Example:
    any_record = next(record for records in readers.values() for record in records.values())
    return any_record, {name: [records.get(row) for row in rows] for name, records in readers.items()}


def number(value: float | None, scale: float = 1, digits: int | None = None) -> str:
    """Returns a formatted figure; "unknown" where it is not finite."""
    scaled = to_number(value) * scale
    if digits is None:
        digits = 0 if isinstance(value, int) else 1 if scale == 100 else 3
    return f"{scaled:,.{digits}f}" if math.isfinite(scaled) else "unknown"


def _interval(interval: Sequence[float] | None, scale: float = 1) -> str:
    return " .. ".join(number(bound, scale) for bound in interval) if interval else "unknown"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if math.isfinite(value) and abs(value) < 100 else number(value)
    return str(value)
