"""An evaluation's figures as tables of words, ready for a page."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lw_jax.evals import verdict
from lw_jax.evals.curve import COLUMNS, Curve
from lw_jax.report.records import Run, to_number

ROWS = {  # what the reader gets before the question
    "text": "the text itself",
    "latents": "the latents of the text",
    "shuffled": "the latents of another text",
    "zero": "latents that are all zeros",
    "none": "nothing",
    "truncated": "the text's first tokens, as many as the message has slots",
}
SHOWN = ("text", "latents", "shuffled")  # of ROWS, in the examples
EXAMPLES = 20
LONGEST = 600  # characters of a question or an answer in the examples
BETWEEN = {  # of `rows.compare`: name -> (what it is, unit, factor)
    "normalised_f1": ("normalised F1", "%", 100),
    "recovered_nll": ("recovered NLL", "%", 100),
    "gap_f1": ("gap of F1", "points", 100),
    "gap_nll": ("gap of NLL", "nats a token", 1),
}
GEOMETRY = {
    "inputs": "texts",
    "effective_rank": "effective rank over texts, centred",
    "effective_rank_uncentred": "the same, not centred",
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
    """Cells as words; the columns after the first hold numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    muted: frozenset[int] = frozenset()  # rows of what was not measured
    words: frozenset[int] = frozenset()  # columns after the first that hold words


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one reader's figures, or all of them, say."""

    key: str  # of verdict.WORDS, or "none": nothing was evaluated
    words: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a reader said."""

    words: str
    mark: str  # "right" | "partly" | "wrong"
    f1: str


@dataclasses.dataclass(frozen=True)
class Shown:
    """One example with every reader's answers, in the order of SHOWN; None where a row was not measured."""

    question: str
    references: str
    readers: dict[str, list[Answer | None]]


def verdicts(run: Run) -> list[Verdict]:
    """Returns a line for each reader, the worst one first; one line where nothing was evaluated."""
    if run.cfg.recipe == "dpo":
        return [_preference(run)]
    if not run.evaluation:
        return [Verdict("none", "no evaluation yet")]
    order = list(verdict.WORDS)
    found = []
    for reader, figures in run.evaluation["readers"].items():
        key = verdict.judge(figures)
        told = [
            f"{what} {_number(figures[name], scale)} {unit} ({_interval(figures.get(f'{name}_interval'), scale)})"
            for name, (what, unit, scale) in BETWEEN.items()
            if figures.get(name) is not None
        ]
        reasons = [f"{name}: {figures[f'{name}_reason']}" for name in BETWEEN if figures.get(f"{name}_reason")]
        found.append(Verdict(key, f"{reader}: {verdict.WORDS[key]}" + "; ".join(["", *told, *reasons])))
    return sorted(found, key=lambda one: -order.index(one.key))


def _preference(run: Run) -> Verdict:
    told = [row for row in run.metrics if "validation/rewards/accuracies" in row]
    if not told:
        return Verdict("none", "no held-out pairs measured yet")
    row = told[-1]
    share, margin = (
        _number(row[f"validation/rewards/{name}"], scale) for name, scale in (("accuracies", 100), ("margins", 1))
    )
    return Verdict("none", f"step {row['step']}: {share} % of the held-out pairs told apart, mean margin {margin}")


def control(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns one reader's rows."""
    head = ["row", "EM, %", "95 %", "F1, %", "95 %", "NLL, nats a token", "95 %"]
    head += ["tokens right, %", "first token right, %", "95 %", "among first 5, %", "different answers, %", "examples"]
    cells = []
    for row, told in rows.items():
        line = [row]
        for name, scale in (("em", 100), ("f1", 100), ("nll", 1)):
            line += [_number(told[name], scale), _interval(told[f"{name}_interval"], scale)]
        line += [_number(told["accuracy"], 100), _number(told["first_token"], 100)]
        line += [_interval(told["first_token_interval"], 100), _number(told["first_5"], 100)]
        cells.append([*line, _number(told["distinct"], 100), str(told["examples"])])
    return Table(head, cells)


def between(readers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns each reader's figures between its rows."""
    head = ["reader", *(cell for what, unit, _ in BETWEEN.values() for cell in (f"{what}, {unit}", "95 %"))]
    cells = []
    for reader, figures in readers.items():
        line = [reader]
        for name, (_, _, scale) in BETWEEN.items():
            line += [_number(figures.get(name), scale), _interval(figures.get(f"{name}_interval"), scale)]
        cells.append(line)
    return Table(head, cells)


def joint(told: Mapping[str, Any]) -> Table:
    """Returns what readers answer together and alone."""
    named = {"the likeliest answer to all readers": told["joint"], "the best reader of each example": told["oracle"]}
    named |= {f"{name} alone": figures for name, figures in told["readers"].items()}
    cells = []
    for name, figures in named.items():
        line = [name]
        for key in ("em", "f1"):
            line += [_number(figures[key], 100), _interval(figures[f"{key}_interval"], 100)]
        cells.append([*line, _number(figures["picked"], 100) if "picked" in figures else ""])
    return Table(["who answers", "EM, %", "95 %", "F1, %", "95 %", "picked, %"], cells)


def agreement(told: Mapping[str, Any]) -> str:
    """Returns how often all readers say the same."""
    share, span = _number(told["agreement"], 100), _interval(told["agreement_interval"], 100)
    return f"All readers say the same, after normalisation, for {share} % ({span}) of {told['examples']} examples."


def geometry(told: Mapping[str, Any]) -> Table:
    """Returns how much the latents differ."""
    head = ("of the latents", "value")
    return Table(head, [(words, _number(told.get(name))) for name, words in GEOMETRY.items()])


def points(curve: Curve) -> Table:
    """Returns what bytes.csv holds."""
    names = [name for name in COLUMNS if any(name in point for point in curve.points)]
    names = ["reader", *(name for name in names if name != "reader")]
    return Table(names, [[_plain(point.get(name, "")) for name in names] for point in curve.points])


def sizes(curve: Curve) -> Table:
    """Returns the bytes of texts and of messages, the smallest first."""
    found = [(size, f"the text, {name}") for name, size in curve.text_bytes.items()]
    messages: dict[float, dict[str, None]] = {}
    for point in curve.points:
        words = f"{point['slots']} x {point['width']} x {point['bits']}"
        messages.setdefault(point["framed_bytes"], {})[words] = None
    found += [(size, "message of " + ", ".join(shapes)) for size, shapes in messages.items()]
    whole = curve.text_bytes["UTF-8"]
    return Table(
        ("what is sent (a message: slots x values x bits)", "mean bytes", "of UTF-8, %"),
        [(words, f"{size:,.0f}", f"{100 * size / whole:,.0f}") for size, words in sorted(found)],
    )


def devices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns each device's use over the run, from means over some seconds each: their mean, and the ends."""
    names = [name for name in DEVICE if any(name in row for row in rows)]
    head = ["device", "hours", *(cell for name in names for cell in (DEVICE[name][0], "from .. to"))]
    head += ["peak memory, GB", "of the limit, %"]
    return Table(head, [_device(device, group, names) for device, group in by_device(rows).items()])


def by_device(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns each device's rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["device"], []).append(row)
    return groups


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Returns the mean over all samples that the rows are means of."""
    return sum(row[name] * row["samples"] for row in rows) / sum(row["samples"] for row in rows)


def _device(device: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    line = [device, f"{sum(row['seconds'] for row in rows) / 3600:.2f}"]
    for name in names:
        told, scale = [row for row in rows if name in row], DEVICE[name][1]
        if not told:
            line += ["unknown", ""]
            continue
        values = [row[name] * scale for row in told]
        line += [f"{mean_of(told, name) * scale:,.1f}", f"{min(values):,.1f} .. {max(values):,.1f}"]
    peak = max((row["peak_bytes"] for row in rows if "peak_bytes" in row), default=None)
    limit = max((row["limit_bytes"] for row in rows if "limit_bytes" in row), default=None)
    share = f"{100 * peak / limit:.0f}" if peak is not None and limit else "unknown"
    return [*line, "unknown" if peak is None else f"{peak / 1e9:,.1f}", share]


def examples(predictions: Sequence[Mapping[str, Any]]) -> tuple[list[Shown], int]:
    """Returns up to EXAMPLES examples spread evenly over the file, and how many it holds."""
    grouped: dict[int, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for record in predictions:
        grouped.setdefault(record["index"], {})[record["reader"], record["row"]] = record
    found = list(grouped.values())
    kept = min(EXAMPLES, len(found))
    return [_show(found[i * len(found) // kept]) for i in range(kept)], len(found)


def _show(records: Mapping[tuple[str, str], Mapping[str, Any]]) -> Shown:
    first = next(iter(records.values()))
    readers = dict.fromkeys(reader for reader, _ in records)
    return Shown(
        question=_cut(first["question"]),
        references=_cut(" | ".join(first["answers"])),
        readers={name: [_answer(records.get((name, row))) for row in SHOWN] for name in readers},
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
