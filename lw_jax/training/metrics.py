"""Metrics as JSON lines, one row a logged step, and the clock of the training loop; other sinks: `sinks`."""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lw_jax.core.files import whole
from lw_jax.training.run_folder import read_logged


class MetricsLog:
    """Rows of `metrics.jsonl`; on a resumed run, rows beyond the restored step are dropped first.

    `revalidate` drops that step's validation too. The file is replaced as a whole, a link by a file of the run's own.
    """

    def __init__(self, path: Path, *, resumed_step: int = 0, revalidate: bool = False):
        self.path = path
        rows = read_logged(path) if resumed_step and path.exists() else ()
        kept = [line.rstrip(b"\n") + b"\n" for line, row in rows if _precedes(row, resumed_step, revalidate)]
        data = b"".join(kept)
        own = path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1
        if not own or path.read_bytes() != data:  # else it keeps the time of its last row, which a page tells
            with whole(path) as partial:
                partial.write_bytes(data)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Appends one line at once: a killed run keeps what it logged."""
        row = {"step": step} | {
            key: value if math.isfinite(value) else str(value) for key, value in values.items()
        }  # JSON has no NaN
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def validates(names: Iterable[str]) -> bool:
    return any(name.startswith("validation/") for name in names)


def _precedes(row: dict[str, Any], resumed_step: int, revalidate: bool) -> bool:
    return row["step"] < resumed_step or (row["step"] == resumed_step and not (revalidate and validates(row)))


class Clock:
    """Seconds per step and time left, without the first step, which compiles."""

    def __init__(self, first_step: int, last_step: int):
        self.last_step = last_step
        self.started = self.marked = time.monotonic()
        self.base_step = self.marked_step = first_step

    def compiled(self, step: int) -> float:
        now = time.monotonic()
        seconds, self.started, self.marked, self.base_step, self.marked_step = now - self.started, now, now, step, step
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes time that is no step, such as a validation; the devices must have finished the steps before it."""
        begun = time.monotonic()
        yield
        passed = time.monotonic() - begun
        self.started, self.marked = self.started + passed, self.marked + passed

    def lap(self, step: int) -> tuple[float, float]:
        """Returns (seconds per step since the last lap, seconds left at the average pace); NaN where no step passed.

        A lap without steps does not count as one: the seconds since the last lap go to the next.
        """
        now = time.monotonic()
        if step == self.marked_step:
            pace = math.nan
        else:
            pace = (now - self.marked) / (step - self.marked_step)
            self.marked, self.marked_step = now, step
        done = step - self.base_step
        return pace, (now - self.started) / done * (self.last_step - step) if done else math.nan
