"""Atomic writes, file locks between processes, and names by content."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` at the end; after an error `path` is unchanged.

    Of two processes that write the same file the last one wins.
    """
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.partial")  # nodes share folders
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def content_hash(content: Any, *, size: int = 16) -> str:
    """Returns the hash of JSON values, `size` bytes as hex digits: equal for equal values, in any process."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=size).hexdigest()


def measure(path: Path) -> tuple[int, str]:
    """Returns the bytes of a file and its SHA-256, as hex digits."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def expand(path: str | Path) -> Path:
    """Returns a path with a `~` of a known user filled in; Path.expanduser raises RuntimeError for an unknown one."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def make_cache(folder: Path) -> Path:
    """Makes a folder of the cache. Raises UserError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be made ({error.strerror}); set LW_JAX_CACHE to a writable folder"
        ) from error
    return folder


def write_whole(path: Path, text: str) -> None:
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove_stale(paths: Iterable[Path], seconds: float) -> None:
    """Removes the files and folders that killed jobs left, unchanged for so long."""
    for path in paths:
        with contextlib.suppress(OSError):  # another's, or another node has just removed it
            if time.time() - path.stat().st_mtime > seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def locked(path: Path, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the lock of a cache file; `waiting` is called once if another process has it.

    Raises:
      UserError: the file system has no locks (Lustre without its mount option, some NFS).
    """
    with path.open("w") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                with phase(f"waiting for another job, which holds {path}"):
                    fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise UserError(
                f"{path}: this file system has no file locks ({name}: {error.strerror}); mount it with them (Lustre: "
                "-o flock), or set LW_JAX_CACHE to a folder on a disk that has them"
            ) from error
        yield
