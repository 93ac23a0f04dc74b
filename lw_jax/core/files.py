"""Files that are there whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to, which takes its place at the end; after an error nothing has changed.

    Two processes that write the same file do not disturb each other: the last one's stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text as UTF-8."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
