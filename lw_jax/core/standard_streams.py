"""Standard output and error that survive a closed pipe. Light at import."""

import io
import os
import sys
from typing import Any


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
