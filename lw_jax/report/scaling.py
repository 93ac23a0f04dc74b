"""Tables of scaling.json (benchmarks/scaling.py), measured rows before planned ones."""

from collections.abc import Sequence
from typing import Any

from lw_jax.report.language import size
from lw_jax.report.records import Run
from lw_jax.report.tables import Table

KINDS = {
    "weak": ("Weak scaling", "constant batch per device"),
    "strong": ("Strong scaling", "constant global batch"),
    "length": ("Window length", "constant tokens a step"),
    "batch": ("Batch of one device", "without accumulation"),
}
HEAD = (
    *("kind", "target", "devices", "window", "batch", "micro x acc.", "remat", "s/step", "tokens/s", "a device"),
    *("efficiency", "MFU", "weights", "optimizer", "activations", "peak", "memory from"),
)
TEXTS = ("kind", "target", "remat", "memory from")  # columns of text


def tables(run: Run) -> list[tuple[str, Table]]:
    """Returns title and table of each scaling that has rows."""
    rows = {name: [row for row in run.scaling if row["scaling"] == name] for name in KINDS}
    return [(f"{title}: {note}", table(rows[name])) for name, (title, note) in KINDS.items() if rows[name]]


def configurations(run: Run) -> str:
    names = dict.fromkeys(f"{row['config']} ({row['parameters']:,} trained values)" for row in run.scaling)
    return ", ".join(names)


def shares_cores(run: Run) -> bool:
    return any(row["kind"] == "measured" and row["target"] == "cpu" and row["devices"] > 1 for row in run.scaling)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the rows as text, measured before planned; `Table.muted` has the planned ones."""
    ordered = sorted(rows, key=lambda row: (row["kind"] != "measured", row["target"], row["config"], *_place(row)))
    cells = [_cells(row, efficiency(row, rows)) for row in ordered]
    muted = frozenset(i for i, row in enumerate(ordered) if row["kind"] != "measured")
    shown = [i for i in range(len(HEAD)) if any(line[i] for line in cells)]
    texts = frozenset(place for place, i in enumerate(shown) if HEAD[i] in TEXTS)
    return Table([HEAD[i] for i in shown], [[line[i] for i in shown] for line in cells], muted, texts)


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["devices"], row["length"], row["global_batch"]


def efficiency(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Returns tokens/s a device over those of one device alone, None where that was not timed alike."""
    if row["scaling"] not in ("weak", "strong") or not row["tokens_per_second"]:
        return None
    same = ("kind", "scaling", "target", "config", "length")
    alone = [other for other in rows if other["devices"] == 1 and all(other[key] == row[key] for key in same)]
    if len(alone) != 1 or not alone[0]["tokens_per_second"]:
        return None
    return row["tokens_per_second"] / row["devices"] / alone[0]["tokens_per_second"]


def _cells(row: dict[str, Any], gained: float | None) -> list[str]:
    rate, seconds = row["tokens_per_second"], row["step_seconds"]
    cells = [row["kind"], row["target"], str(row["devices"]), f"{row['length']:,}", f"{row['global_batch']:,}"]
    if row["obstacle"]:
        return [*cells, "", row["obstacle"], *[""] * (len(HEAD) - 7)]
    cells += [f"{row['micro_batch']} x {row['accumulation']}", row["remat"], _number(seconds, 4)]
    if seconds and "step_seconds_least" in row and "step_seconds_most" in row:
        spread = (row["step_seconds_most"] - row["step_seconds_least"]) / 2 / seconds
        cells[-1] += f" ±{100 * spread:.0f} %"
    cells += [_number(rate, 0), _number(rate and rate / row["devices"], 0)]
    cells += ["" if share is None else f"{100 * share:.1f} %" for share in (gained, row["mfu"])]
    cells += [size(row[f"{name}_bytes"]) for name in ("weights", "optimizer", "activation", "peak")]
    return [*cells, "the device" if row["peak_from"] == "device" else row["peak_from"]]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
