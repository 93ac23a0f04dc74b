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

    Unfinished files stay as after a kill and are made again. The training loop has its own handler
    (`runtime.Preemption`).
    """
    before = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _end_at_once(_number: int, _frame: types.FrameType | None) -> NoReturn:
    # os.write: print is not safe inside a handler that may have interrupted another print.
    os.write(2, b"\nstopped on request, no step to save since the last checkpoint; run the same command to resume\n")
    os._exit(REQUEUE)  # a SystemExit that is raised inside a callback of C, as JAX's of the garbage collector, is lost
