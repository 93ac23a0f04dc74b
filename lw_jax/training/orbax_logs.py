"""Filters of orbax's log lines and tracebacks that repeat the error it raises."""

import functools
import logging
import sys
import traceback


@functools.cache
def install() -> None:
    logging.getLogger("absl").addFilter(_is_no_failed_write)
    logging.getLogger("asyncio").addFilter(_is_no_second_failure)
    _ignore_late_arrays()


def _is_no_failed_write(entry: logging.LogRecord) -> bool:
    """Drops orbax's tracebacks of a failed write, whose error is raised to the caller."""
    return not (entry.exc_info and "orbax" in entry.pathname)


def _is_no_second_failure(entry: logging.LogRecord) -> bool:
    """Drops asyncio's tracebacks of files that failed beside the one whose error is raised.

    Orbax writes many at once and closes their event loop at the first failure: the errors of those that fail in the
    loop's last round are never asked for, and asyncio prints them when they are collected, in about one try of four.
    What orbax and tensorstore raise for a file are these two classes, which `Checkpointer` turns into one line.
    """
    failed = bool(entry.exc_info) and isinstance(entry.exc_info[1], OSError | ValueError)
    return not (failed and "exception was never retrieved" in entry.getMessage())


def _ignore_late_arrays() -> None:
    """Drops tracebacks of arrays in flight when another array failed, whose error is raised.

    In writing, as on a full disk, their futures report to an event loop that orbax has closed by then: dozens of
    tracebacks without the cause. In reading, orbax turns the end of their coroutines into errors never awaited.
    """
    before = sys.unraisablehook

    def report(error: "sys.UnraisableHookArgs") -> None:
        frames = [frame for frame, _ in traceback.walk_tb(error.exc_traceback)]
        within = frames[-1].f_globals.get("__name__", "") if frames else ""
        closed = str(error.exc_value) == "Event loop is closed" and within.startswith("asyncio.")
        ended = isinstance(getattr(error.exc_value, "__cause__", None), GeneratorExit) and within.startswith("orbax.")
        if not closed and not ended:
            before(error)

    sys.unraisablehook = report
