"""How far the work is: on a terminal a view that is refreshed in place, elsewhere plain lines.

`Live` shows the steps of a run, `phase` all other work that may last. Imports no JAX.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Self, TypeVar

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn
from rich.table import Column
from rich.text import Text

from lw_jax.core.errors import UserError

REFRESHES_PER_SECOND = 4
SECONDS = "LW_JAX_PROGRESS_SECONDS"  # between two lines about a phase where there is no terminal: 10 without it

_T = TypeVar("_T")

quiet: ContextVar[bool] = ContextVar("quiet", default=False)  # `say` prints nothing in this thread

_view: "_View | None" = None  # on the screen now
_phases: "list[_Phase]" = []  # entered and not left, the outermost first


def say(text: str) -> None:
    """Prints a line of a command's output, in the first process."""
    if is_first_process() and not quiet.get():
        print(text, flush=True)


def duration(seconds: float) -> str:
    """Returns "2h 05m", "3m 20s" or "12s", and "-" for NaN (nothing was measured)."""
    if math.isnan(seconds):
        return "-"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


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
        if self._enabled and _moves(sys.stdout):
            self._view = _View(Console(file=sys.stdout, highlight=False), self._devices)
            self._steps = self._view.add_task("", total=self._total, completed=self._first, of=None)
            self._view.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.stop()
            self._view = None

    def show_line(self, line: str) -> None:
        if self._view is not None:
            self._view.console.print(Text(line), soft_wrap=True)
        elif self._enabled:
            print(line, flush=True)

    def advance(self, step: int) -> None:
        if self._view is not None:
            self._view.update(self._steps, completed=step)

    def update(self, step: int, texts: list[str], seconds_left: float) -> None:
        """Shows a report: the texts in their order, and the time left (NaN: not known yet)."""
        self.advance(step)
        if self._view is not None:
            self._view.texts, self._view.ends = texts, time.monotonic() + seconds_left
        elif self._enabled:
            print("  ".join([f"step {step}/{self._total}", *texts, f"left {duration(seconds_left)}"]), flush=True)


@contextlib.contextmanager
def phase(what: str, total: float = 0, unit: str = "", *, ends: bool = True) -> "Iterator[_Phase]":
    """Tells on standard error how far a phase is: a bar on a terminal, else a line every ten seconds (`SECONDS`).

    The innermost phase tells. What is yielded takes how much is done, as `advance(1)`; without a `total` the time that
    has passed is reported; where `ends` also how long it was. Processes beside the first are silent.
    """
    work = _Phase(what, total, unit)
    if not is_first_process():
        yield work
        return
    _phases.append(work)
    teller = threading.Thread(target=work.tell, daemon=True)
    try:
        with _bar(work):
            teller.start()
            try:
                yield work
            finally:  # while the bar stands, or a last line would come below it
                work.ended.set()
                teller.join()
    finally:
        _phases.remove(work)
    if ends:
        work.tell_end()


class _Phase:
    def __init__(self, what: str, total: float, unit: str):
        self.what, self.total, self.unit, self.done, self._skipped = what, total, unit, 0.0, 0.0
        self.ended, self._begun, self._told = threading.Event(), time.monotonic(), False
        self._seconds = _seconds()
        self._first: tuple[float, float] | None = None  # when the first part, which compiles, was done, and its size

    def advance(self, count: float = 1) -> None:
        self.done += count
        self._first = self._first or (time.monotonic(), self.done - self._skipped)

    def skip(self, count: float = 1) -> None:
        """Counts as done what was done before, which says nothing of the time that the rest takes."""
        self.done, self._skipped = self.done + count, self._skipped + count

    def track(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yields the items, each counted as done when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def __str__(self) -> str:
        """Returns "reading texts: 120 of 512, left 31s"."""
        now = time.monotonic()
        if not self.total:
            done = f"{self.done:,.0f} {self.unit}, " if self.done else ""
            return f"{self.what}: {done}{duration(now - self._begun)}"
        text = f"{self.what}: {self.done:,.0f} of {self.total:,.0f}{self.unit and ' '}{self.unit}"
        worked = self.done - self._skipped
        begun, first = self._first or (now, worked)
        if first == worked:
            return f"{text}, {duration(now - self._begun)} so far"
        left = (now - begun) / (worked - first) * max(0.0, self.total - self.done)
        return f"{text}, left {duration(left)}"

    def tell(self) -> None:
        """Prints a line every so many seconds until the phase ends, where no view shows it."""
        while not self.ended.wait(self._seconds):
            if _view is None and _phases[-1:] == [self]:
                self._told = True
                print(self, file=sys.stderr, flush=True)

    def tell_end(self) -> None:
        if self._told:
            print(f"{self.what}: done in {duration(time.monotonic() - self._begun)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(work: _Phase) -> Iterator[None]:
    if _view is None and not _moves(sys.stderr):
        yield
        return
    console = Console(file=sys.stderr, highlight=False)
    with contextlib.nullcontext(_view) if _view else _View(console, transient=True) as view:
        bar = view.add_task("", total=work.total or None, of=work)
        try:
            yield
        finally:
            view.remove_task(bar)


def _seconds() -> float:
    text = os.environ.get(SECONDS) or "10"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise UserError(f"{SECONDS}={text!r}: seconds between two lines of progress; set a number above 0, as 60")
    return seconds


def _moves(stream: object) -> bool:
    return bool(getattr(stream, "isatty", bool)()) and os.environ.get("TERM") != "dumb"


def is_first_process() -> bool:
    """Says whether this process tells people something: of several of a run the first one."""
    jax = sys.modules.get("jax")  # one process alone does not start its devices here
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


class _Says(ProgressColumn):
    """The text of a bar: of a phase what it says, of a run the steps."""

    def render(self, task: Task) -> Text:
        work = task.fields["of"]
        if work is None:
            return Text(f"step {task.completed:.0f}/{task.total or 0:.0f}")
        task.completed, task.total = work.done, work.total or None
        return Text(str(work), no_wrap=True, overflow="ellipsis")


class _View(Progress):
    """Bars of a run and of phases; below them the last report, the devices and the time left, which counts down."""

    def __init__(self, console: Console, devices: Callable[[], list[str]] | None = None, *, transient: bool = False):
        self._devices = devices  # before all else: Progress draws itself while it is made
        self.texts: list[str] = []
        self.ends = math.nan  # on the monotonic clock
        super().__init__(
            _Says(Column(no_wrap=True)),  # the bars shrink, not the time left
            BarColumn(bar_width=None),
            TaskProgressColumn(show_speed=True),  # without a total: nothing
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
            redirect_stderr=sys.stderr.isatty(),
            expand=True,
            transient=transient,
        )

    def start(self) -> None:
        global _view
        _view = self
        super().start()

    def stop(self) -> None:
        global _view
        _view = None
        super().stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self._devices is None:
            return
        left = self.ends - time.monotonic()
        left = left if math.isnan(left) else max(0.0, left)
        for texts in (self.texts, [*self._devices(), f"left {duration(left)}"]):
            yield Columns([Text(text, no_wrap=True) for text in texts], padding=(0, 2))
