"""Progress of a run: on a terminal a view that is refreshed in place, elsewhere one plain line a report."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Self

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from lw_jax.training.metrics import duration

REFRESHES_PER_SECOND = 4


class Live:
    """Shows steps and lines while it is entered; before and after, and off a terminal, it prints plain lines.

    Where `enabled` is false, as in all processes but the first, nothing is shown. `devices` returns the texts of the
    devices' state (`Sampler.describe`), at each refresh of the view.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        enabled: bool = True,
        devices: Callable[[], list[str]] = list,
    ):
        self._total, self._first, self._enabled, self._devices = total_steps, first_step, enabled, devices
        self._view: _View | None = None

    def __enter__(self) -> Self:
        """Opens the view where standard output is a terminal that can move its cursor."""
        if self._enabled and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._view = _View(self._total, self._first, self._devices)
            self._view.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the last state of the view on the screen."""
        if self._view is not None:
            self._view.stop()
            self._view = None

    def show_line(self, line: str) -> None:
        """Prints a line, above the view where there is one."""
        if self._view is not None:
            self._view.console.print(Text(line), soft_wrap=True)
        elif self._enabled:
            print(line, flush=True)

    def advance(self, step: int) -> None:
        """Moves the bar of the view; prints nothing."""
        if self._view is not None:
            self._view.move(step)

    def update(self, step: int, text_fields: dict[str, str], seconds_left: float) -> None:
        """Shows a report: the texts in their order, and the time left (NaN: not known yet)."""
        texts = list(text_fields.values())
        if self._view is not None:
            self._view.move(step)
            self._view.show(texts, seconds_left)
        elif self._enabled:
            print("  ".join([f"step {step}/{self._total}", *texts, f"left {duration(seconds_left)}"]), flush=True)


class _View(Progress):
    """A bar, and below it the last report, the devices and the time left, which counts down between reports."""

    def __init__(self, total_steps: int, first_step: int, devices: Callable[[], list[str]]):
        self._devices = devices  # before all else: Progress draws itself while it is made
        self._texts: list[str] = []
        self._ends = math.nan  # on the monotonic clock
        super().__init__(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            console=Console(file=sys.stdout, highlight=False),
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stderr=sys.stderr.isatty(),  # what goes to a file stays there
            expand=True,
        )
        self._bar = self.add_task("", total=total_steps, completed=first_step)

    def move(self, step: int) -> None:
        self.update(self._bar, completed=step)

    def show(self, texts: list[str], seconds_left: float) -> None:
        self._texts, self._ends = texts, time.monotonic() + seconds_left

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        left = self._ends - time.monotonic()
        left = left if math.isnan(left) else max(0.0, left)
        for texts in (self._texts, [*self._devices(), f"left {duration(left)}"]):
            yield Columns([Text(text, no_wrap=True) for text in texts], padding=(0, 2))
