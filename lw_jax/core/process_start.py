"""What a process sets before anything heavy is imported: an end at once on SIGTERM, streams that outlive their pipe."""

import contextlib
import io
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped on request, everything is saved, run the same command to resume
INTERRUPTED = 130  # Ctrl-C, as shells report it


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
    os.write(2, b"\nstopped on request, no step to save since the last checkpoint; run the same command to resume\n")
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
