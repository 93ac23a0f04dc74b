"""SIGTERM before the training loop: end at once, as there is nothing to save. Light at import."""

import contextlib
import os
import signal
import types
from collections.abc import Iterator
from typing import NoReturn

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped on request, everything is saved, run the same command to resume
INTERRUPTED = 130  # Ctrl-C, as shells report it


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Ends the process with REQUEUE on SIGTERM while it imports, loads models, makes readers or prepares data.

    Unfinished files stay as after a kill and are made again. Ctrl-C interrupts, even where a shell ignores it, as in
    the training loop, which has its own handlers (`runtime.Preemption`).
    """
    handlers = {signal.SIGTERM: _end_at_once, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _end_at_once(_number: int, _frame: types.FrameType | None) -> NoReturn:
    # os.write: print is not safe inside a handler that may have interrupted another print.
    os.write(2, b"\nstopped on request, no step to save since the last checkpoint; run the same command to resume\n")
    os._exit(REQUEUE)  # a SystemExit that is raised inside a callback of C, as JAX's of the garbage collector, is lost
