"""Message I/O for `answer`: texts and messages from and to files and pipes. Free of JAX: errors come at once."""

import sys
from pathlib import Path

from lw_jax.core.errors import UserError

_TEXT_BYTES = 256 << 20  # of a context: thousands of encoder windows
_MESSAGE_BYTES = 256 << 20  # of kind cache; of latents 32 MiB is the longest


def read_text(path: str) -> str:
    """Returns the UTF-8 text of a file, or of standard input for '-'; raises UserError for an empty one."""
    try:
        raw = _read_bytes(path, flag="context", what="a readable UTF-8 text file", limit=_TEXT_BYTES)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--context {path}: {error}; a readable UTF-8 text file is needed.") from error
    if not text.strip():
        raise UserError(f"--context {path}: empty; a text of at least one word is needed.")
    return text


def read_message(path: str) -> bytes:
    """Returns the bytes of a file, or of standard input for '-'; raises UserError where there are none."""
    message = _read_bytes(path, flag="message", what="a file that `answer --write` wrote", limit=_MESSAGE_BYTES)
    if not message:
        raise UserError(f"--message {path}: empty; a file or pipe that `answer --write` wrote is needed.")
    return message


def write_message(message: bytes, path: str) -> None:
    if path == "-":
        sys.stdout.buffer.write(message)
        sys.stdout.buffer.flush()
        return
    try:
        Path(path).write_bytes(message)
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}; a file in a writable folder is needed.") from error


def _read_bytes(path: str, *, flag: str, what: str, limit: int) -> bytes:
    """Reads at most one byte above the limit, so that a device or an endless pipe ends too."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(limit + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"--{flag} {path}: {error.strerror}; {what} is needed.") from error
    if len(data) > limit:
        raise UserError(f"--{flag} {path}: more than {limit:,} bytes; {what} is needed.")
    return data
