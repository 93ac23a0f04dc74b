"""Panels of a run's log over its steps."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from lw_jax.core import config
from lw_jax.report.figures import Line, Panel
from lw_jax.report.records import Run, to_number

MOST = 400  # points of a line; beyond it a point is the mean of consecutive values
DECADE = 10  # a logarithmic axis over less would have one label or none
# Of preference tuning: unit of a panel -> the metrics that share it, by TRL's names
PREFERENCE = {
    "accuracy of pairs": ("rewards/accuracies",),
    "reward, beta x nats": ("rewards/margins", "rewards/chosen", "rewards/rejected"),
    "log-probability, nats an answer": ("logps/chosen", "logps/rejected"),
}
NLL = re.compile(r"(?P<phase>train|validation)/(?P<other>shuffled/)?(?:(?P<task>[^/]+)/)?nll/(?P<reader>[^/]+)")


def training(run: Run) -> list[Panel]:
    unit = "loss, all tasks weighted" if run.cfg.recipe == "latentwire" else "loss"
    loss = Panel("", unit, [read_line(run, "train/loss", "loss")], True)
    rate = Panel("", "learning rate", [read_line(run, "train/learning_rate", "learning rate")], False)
    return keep_drawable([loss, *_by_task(run, "train"), *_of_pairs(run, "train"), rate])


def validation(run: Run) -> list[Panel]:
    held_out = read_line(run, "validation/loss", "loss")
    pairs = _of_pairs(run, "validation")
    return keep_drawable(
        [*_by_task(run, "validation"), *([Panel("", "loss", [held_out], False)] if pairs else []), *pairs]
    )


def borders(run: Run) -> list[tuple[str, int]]:
    """Returns (name, first step) of each stage."""
    starts, first = [], 1
    for name, _, steps in config.stages(run.cfg):
        starts.append((name, first))
        first += steps
    return starts


def count_undefined(run: Run) -> int:
    values = (value for row in run.metrics for value in row.values())
    return sum(not math.isfinite(to_number(value)) for value in values)


def count_joined(run: Run) -> int:
    """Returns of how many logged values a point of the longest line is the mean."""
    return _joined(sum("train/loss" in row for row in run.metrics))


def _by_task(run: Run, phase: str) -> list[Panel]:
    readers = list(run.cfg.llms)
    matches = (NLL.fullmatch(key) for key in dict.fromkeys(key for row in run.metrics for key in row))
    selected = [match for match in matches if match and match["phase"] == phase and match["reader"] in readers]
    # Answers last: earlier stages reconstruct and continue.
    tasks: dict[str, list[Line]] = {match["task"]: [] for match in selected if match["task"]}
    for match in sorted(selected, key=lambda match: (readers.index(match["reader"]), bool(match["other"]))):
        label = match["reader"] + (", another text's latents" if match["other"] else "")
        line = read_line(
            run, match[0], label, colour=readers.index(match["reader"]), style="--" if match["other"] else "-"
        )
        tasks.setdefault(match["task"] or "answer", []).append(line)
    return [Panel(task, "NLL, nats a token", lines, True) for task, lines in tasks.items()]


def _of_pairs(run: Run, phase: str) -> list[Panel]:
    logged = {key for row in run.metrics for key in row}
    return [
        Panel(
            "",
            unit,
            [read_line(run, f"{phase}/{name}", name.partition("/")[2], colour=i) for i, name in enumerate(names)],
            False,
        )
        for unit, names in PREFERENCE.items()
        if logged.intersection(f"{phase}/{name}" for name in names)
    ]


def read_line(run: Run, key: str, label: str, *, colour: int | None = None, style: str = "-") -> Line:
    """Returns one logged value over the steps, averaged to at most MOST points."""
    logged = [(row["step"], to_number(row[key])) for row in run.metrics if key in row]
    count = _joined(len(logged))
    steps, values = _join([step for step, _ in logged], count), _join([value for _, value in logged], count)
    return Line(label, steps, values, colour, style)


def _joined(logged: int) -> int:
    return max(1, math.ceil(logged / MOST))


def _join(values: Sequence[float], count: int) -> list[float]:
    groups = (np.asarray(values[start : start + count], float) for start in range(0, len(values), count))
    return [float(np.mean(group)) if np.isfinite(group).all() else math.nan for group in groups]


def keep_drawable(panels: Iterable[Panel]) -> list[Panel]:
    """Returns the panels without empty lines; logarithmic only over more than a decade."""
    drawable: list[Panel] = []
    for panel in panels:
        lines = [line for line in panel.lines if any(map(math.isfinite, line.values))]
        values = [value for line in lines for value in line.values if math.isfinite(value)]
        if lines:
            is_logarithmic = panel.is_logarithmic and max(values) > DECADE * min(values) > 0
            drawable.append(dataclasses.replace(panel, lines=lines, is_logarithmic=is_logarithmic))
    return drawable
