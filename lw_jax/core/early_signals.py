"""The end by signal while there is nothing to save yet; light at import, for it comes before anything heavy."""

import contextlib
import os
import signal
import types
from collections.abc import Iterator
from typing import NoReturn

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped on request, all is saved, start the same command again


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Ends the process with REQUEUE on SIGTERM: while it imports, loads models, makes readers or prepares data.

    What is half made stays as after a kill, and is made again. The training loop listens for itself
    (`runtime.Preemption`).
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _leave(_number: int, _frame: types.FrameType | None) -> NoReturn:
    # os.write: print is not safe inside a handler that may have interrupted another print.
    os.write(2, b"\nstopped on request, no step to save since the last checkpoint; the same command resumes\n")
    os._exit(REQUEUE)  # a SystemExit that is raised inside a callback of C, as JAX's of the garbage collector, is lost
