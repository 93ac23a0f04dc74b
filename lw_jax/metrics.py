"""Metrics as JSON lines, one object a logged step; the same file whatever the recipe."""

import json
import math
import time
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends to `metrics.jsonl`; on a resumed run, lines beyond the step taken up are dropped first."""

    def __init__(self, path: Path, *, resumed_step: int = 0):
        self.path = path
        kept = [row for row in read(path) if row["step"] <= resumed_step] if path.exists() else []
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Appends one line at once, so that a killed run keeps what it logged."""
        row = {"step": step} | {
            key: value if math.isfinite(value) else str(value) for key, value in values.items()
        }  # JSON has no NaN
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file; a last line cut by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Clock:
    """Seconds per step and time left, without the first step, which compiles."""

    def __init__(self, first_step: int, last_step: int):
        self.last_step = last_step
        self.started = self.marked = time.monotonic()
        self.base_step = self.marked_step = first_step

    def compiled(self, step: int) -> float:
        """Restarts the count after the compiling step and returns its seconds."""
        now = time.monotonic()
        seconds, self.started, self.marked, self.base_step, self.marked_step = now - self.started, now, now, step, step
        return seconds

    def lap(self, step: int) -> tuple[float, float]:
        """Returns (seconds per step since the last lap, seconds left at the average pace)."""
        now = time.monotonic()
        pace = (now - self.marked) / max(1, step - self.marked_step)
        left = (now - self.started) / max(1, step - self.base_step) * (self.last_step - step)
        self.marked, self.marked_step = now, step
        return pace, left


def duration(seconds: float) -> str:
    """Returns "2h 05m", "3m 20s" or "12s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"
