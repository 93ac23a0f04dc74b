"""Cells and tables of docs/planning.md, from plans as `python run.py plan --json` prints them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Plan = Mapping[str, Any]  # what `plan --json` prints
Plans = Mapping[str, Plan]  # by target

CARDS = {"h100": "H100 80 GB", "a100_40": "A100 40 GB", "a100_80": "A100 80 GB"}
COUNTS = {"h100": (1, 2, 3, 4, 5, 6, 7, 8), "a100_40": (1, 2, 3, 4, 8), "a100_80": (1, 2, 3, 4, 8)}
TARGETS = (*(f"{card}x{count}" for card, counts in COUNTS.items() for count in counts), "h200x1", "2xh100x8")
ABSENT = "not planned"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a Markdown table with aligned columns; columns without words stand to the right."""
    body = [tuple(row) for row in rows]
    columns = list(zip(head, *body, strict=True))
    right = [not any(re.search("[a-wyzA-Z]", cell) for cell in column[1:]) for column in columns]
    widths = [max(3, *map(len, column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        cells = (
            f"{cell:>{width}}" if at_right else f"{cell:<{width}}"
            for cell, width, at_right in zip(row, widths, right, strict=True)
        )
        return f"| {' | '.join(cells)} |"

    rule = (
        "-" * (width + 1) + ":" if at_right else "-" * (width + 2)
        for width, at_right in zip(widths, right, strict=True)
    )
    return [line(head), f"|{'|'.join(rule)}|", *map(line, body)]


def number(value: float | None, digits: int) -> str:
    """Returns a number, or "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def gb(row: Mapping[str, Any] | None, key: str, digits: int = 1) -> str:
    """Returns bytes of a candidate in GB."""
    return number(row[key] / 1e9 if row else None, digits)


def held_bytes(row: Mapping[str, Any]) -> int:
    """Returns what a GPU holds whatever the batch: frozen weights, what learns and the optimizer."""
    return row["weights_bytes"] + row["trainable_bytes"] + row["optimizer_bytes"]


def layout(row: Mapping[str, Any]) -> str:
    """Returns a candidate's strategy with its mesh; a mesh that was never made is left out."""
    return row["strategy"] if "?" in row["mesh"] else f"{row['strategy']} {row['mesh']}"


def named(row: Mapping[str, Any]) -> str:
    """Returns a candidate's strategy, with the mesh where a number of GPUs has several of it."""
    return layout(row) if row["strategy"] == "tensor" else row["strategy"]


def batch(row: Mapping[str, Any]) -> str:
    """Returns a candidate's examples on a GPU and how often they are accumulated."""
    return f"{row['micro_batch']} x {row['accumulation']}"


def short(row: Mapping[str, Any]) -> str:
    """Returns why a candidate cannot be, without the remedy and what its row says already."""
    uneven = re.search(r"(\S+) \([\d, ]+\): dim \d+ \((\d+)\) does not divide mesh axis (\w+=\d+)", row["obstacle"])
    if uneven:
        return f"{uneven[2]} of {uneven[1]} is not divisible by {uneven[3]}"
    return row["obstacle"].partition(";")[0].rpartition(": ")[2]


def best_of(plans: Plans, target: str) -> Plan | None:
    """Returns what is chosen on a target; None where nothing fits or nothing was planned."""
    return plans[target]["chosen"] if target in plans else None


def single(plans: Plans) -> Mapping[str, Any] | None:
    """Returns a measured candidate that runs on one GPU: its FLOPs and weights are those of the whole; None: none."""
    rows = (row for one in plans.values() for row in one["candidates"])
    return next((row for row in rows if row["strategy"] == "single" and row["flops"]), None)
