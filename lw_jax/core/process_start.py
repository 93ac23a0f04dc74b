"""What a process sets before anything heavy is imported: its end on SIGTERM, its streams, one form for all warnings."""

import contextlib
import io
import logging
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from lw_jax.core.errors import one_line
from lw_jax.core.progress import is_first_process

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped on request, everything is saved, run the same command to resume
INTERRUPTED = 130  # Ctrl-C, as shells report it
OWN = ("lw_jax", "sharding", "configs")  # packages, and the names of their loggers
_PROJECT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def handling(handlers: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    """Handles signals so while it is entered; raises ValueError outside the main thread, where Python allows none."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def at_once() -> contextlib.AbstractContextManager[None]:
    """Ends the process with REQUEUE on SIGTERM while it imports, loads models, makes readers or prepares data.

    Unfinished files stay as after a kill and are made again. Ctrl-C interrupts, even where a shell ignores it, as in
    the training loop, which has its own handlers (`runtime.Preemption`).
    """
    return handling({signal.SIGTERM: _end_at_once, signal.SIGINT: signal.default_int_handler})


def _end_at_once(_number: int, _frame: types.FrameType | None) -> NoReturn:
    # os.write: print is not safe inside a handler that may have interrupted another print.
    remedy = b"run the same command to resume from the last checkpoint; without one it begins anew"
    os.write(2, b"\nstopped on request, no step to save: " + remedy + b"\n")
    os._exit(REQUEUE)  # a SystemExit that is raised inside a callback of C, as JAX's of the garbage collector, is lost


class _SurvivingStream(io.FileIO):
    """A standard stream that goes to /dev/null once its pipe is closed at the other end."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return super().write(data)


def survive_closed_pipes() -> None:
    """Lets the program go on where nobody reads what it prints any more, as behind `head` or a `tee` that died.

    Training, evaluation and what other commands write would end in the middle otherwise. For a process that is this
    program's alone: it replaces `sys.stdout` and `sys.stderr`.
    """
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        if before is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
            continue
        raw = _SurvivingStream(before.fileno(), "w", closefd=False)
        buffered = io.BufferedWriter(raw)
        text = io.TextIOWrapper(buffered, encoding=before.encoding, errors=before.errors, line_buffering=True)
        setattr(sys, name, text)


class _Lines(logging.Handler):
    """Prints a record as one line; of several processes in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname.lower()}: {one_line(record.getMessage())}"
        if line not in self._printed and is_first_process():
            self._printed.add(line)
            print(line, file=sys.stderr, flush=True)


def unify_warnings() -> None:
    """Gives this project's logging, and all that `warnings.warn` tells, one form: "warning: ..." on stderr, once each.

    For a process that is this program's alone.
    """
    lines = _Lines()
    for name in OWN:
        logger = logging.getLogger(name)
        logger.addHandler(lines)
        logger.propagate = False  # or the root's handlers, absl's among them, print them again
    warnings.showwarning = _show


def _show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    file = Path(filename).absolute()
    internal = file.is_relative_to(_PROJECT) and file.relative_to(_PROJECT).parts[0] in (*OWN, "run.py")
    place = "" if internal else f" ({category.__name__}, {filename}:{lineno})"
    logging.getLogger(OWN[0]).warning("%s%s", message, place)
