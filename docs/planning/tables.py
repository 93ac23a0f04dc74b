"""Cells and tables of docs/planning.md, from plans as `python run.py plan --json` prints them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Plan = Mapping[str, Any]  # what `plan --json` prints
Plans = Mapping[str, Plan]  # by target

CARDS = {"h100": "H100 80 GB", "a100_40": "A100 40 GB", "a100_80": "A100 80 GB"}
COUNTS = (1, 2, 3, 4, 8)
TARGETS = (*(f"{card}x{count}" for card in CARDS for count in COUNTS), "h200x1", "2xh100x8")
ABSENT = "not planned"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a Markdown table with aligned columns, numbers to the right."""
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


def words(row: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Returns strategy, mesh, recomputation, batch and peak of a candidate."""
    batch = f"{row['micro_batch']} x {row['accumulation']}"
    return row["strategy"], row["mesh"], row["remat"], batch, gb(row, "peak_bytes")


def short(row: Mapping[str, Any]) -> str:
    """Returns why a candidate cannot be, without the remedy and the names that its row has already."""
    told = re.sub(r" \(sizes that do[^)]*\)", "", row["obstacle"]).partition(";")[0]
    return told.rpartition(": ")[2]


def best_of(plans: Plans, target: str) -> Plan | None:
    """Returns what is chosen on a target; None where nothing fits or nothing was planned."""
    return plans[target]["chosen"] if target in plans else None
