"""One form for all warnings of a command: "warning: ..." on standard error, the same one once. Light at import."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from lw_jax.core.errors import one_line
from lw_jax.core.progress import is_first_process

_PROJECT = Path(__file__).resolve().parents[2]
OWN = ("lw_jax", "sharding", "configs")  # packages, and the names of their loggers


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


def install() -> None:
    """Gives this project's logging, and all that `warnings.warn` tells, the one form.

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
