"""Rows of files, streamed and typed: the one path by which text data enters.

JSON lines are decoded line by line, a JSON array or document at once, each as the type that its reader names; plain
text comes paragraph by paragraph. Files may be gzipped. Every length that a file can name is bounded before it is held.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from lw_jax.core import schema
from lw_jax.core.errors import UserError

ROW_BYTES = 64 << 20  # of one line, or of one paragraph of plain text
DOCUMENT_BYTES = 1 << 30  # of JSON that is one document and is decoded at once; HotpotQA's training file has 540 MB
PACKED_BYTES = 64 << 20  # of any gzip file; what holds more may expand by PACKED_RATIO at most
PACKED_RATIO = 100  # text expands 3 to 10 times, zeros a thousand times


class Text(msgspec.Struct, frozen=True):
    """A row of a passage file or of a corpus."""

    text: str


class _Object(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw(b"")  # skipped, whatever it holds


class _Unpacked(io.RawIOBase):
    """The bytes that a gzip file expands to, refused where they are out of all proportion."""

    def __init__(self, path: Path, packed: IO[bytes]) -> None:
        self._path, self._packed, self._file, self._count = path, packed, gzip.GzipFile(fileobj=packed), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._count += count
        read = self._packed.tell()
        if self._count > max(PACKED_BYTES, PACKED_RATIO * read):
            raise UserError(
                f"{self._path}: its first {read:,} bytes expand to more than {self._count:,}, {PACKED_RATIO} times as "
                "many: no text does; unpack the file if it is meant so"
            )
        return count


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file, gzipped or not, for streaming.

    Raises:
        UserError: it is missing, unreadable or broken, now or while it is read; or what `_Unpacked` refuses.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            yield io.BufferedReader(_Unpacked(path, raw), 1 << 18) if packed else raw
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file (seen from {Path.cwd()}); name another, also .gz") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a directory; name a file in it, also .gz") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: broken gzip data ({error}); fetch or compress the file again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); convert it to UTF-8") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); fix its permissions or name another file"
        ) from error


def lines(file: IO[bytes], path: Path, limit: int = ROW_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, bytes) of the lines that are not blank. Raises UserError for one beyond the limit."""
    for number in itertools.count(1):
        line = file.readline(limit + 1)
        if not line:
            return
        if len(line) > limit:
            raise UserError(f"{path}:{number}: a line of more than {limit:,} bytes; split or remove it")
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            yield number, line


def paragraphs(path: Path) -> Iterator[str]:
    """Yields the parts of a text file between empty lines, stripped; blank ones are left out."""
    with opened(path) as file:
        held: list[bytes] = []
        size = 0
        for number in itertools.count(1):
            line = file.readline(ROW_BYTES + 1)
            size += len(line)
            if size > ROW_BYTES:
                raise UserError(
                    f"{path}:{number}: a paragraph of more than {ROW_BYTES:,} bytes; separate paragraphs by blank lines"
                )
            if line in (b"", b"\n", b"\r\n"):
                if text := b"".join(held).decode("utf-8-sig").replace("\r\n", "\n").strip():
                    yield text
                held, size = [], 0
                if not line:
                    return
            held.append(line)


def read(path: Path, *, remedy: str, document: type[Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields (place, object) of a file of JSON lines, of a JSON array, or of one row; by its content, not its name.

    Args:
        path: a file, also .gz.
        remedy: what the rows should look like, for messages.
        document: the type of a file that is one object with an array "data"; it is yielded whole.

    Raises:
        UserError: names file, row, field, value, rule and remedy.
    """
    listed = ".jsonl" in path.suffixes
    with opened(path) as file:
        whole = not listed and file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"", b"{", b"[")
        found = lines(file, path, DOCUMENT_BYTES if whole else ROW_BYTES)
        begin = list(itertools.islice(found, 2))
        if not begin:
            raise UserError(f"{path}: the file is empty; {remedy}")
        if len(begin) == 2 and (listed or _is_object(begin[0][1])):
            for number, line in itertools.chain(begin, found):
                where = f"{path}:{number}"
                yield where, decode(line, where=where, remedy=remedy)
            return
        number, data = begin[0]
    yield from _read_document(path, _read_whole(path) if len(begin) == 2 else data, number, document, remedy)


def decode(line: bytes, *, where: str, remedy: str) -> dict[str, Any]:
    """Returns one row of JSON."""
    return schema.decode(line, dict[str, Any], where=where, remedy=remedy)


def _read_document(
    path: Path, data: bytes, number: int, document: type[Any] | None, remedy: str
) -> Iterator[tuple[str, Any]]:
    first = re.match(rb"\s*(.?)", data, re.DOTALL)
    if first and first[1] == b"[":
        rows = schema.decode(data, list[dict[str, Any]], where=str(path), remedy=remedy)
        yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))
    elif document is not None and memoryview(_object(data).data)[:1] == b"[":
        yield str(path), schema.decode(data, document, where=str(path), remedy=remedy)
    else:
        where = f"{path}:{number}"
        yield where, decode(data, where=where, remedy=remedy)


def _read_whole(path: Path) -> bytes:
    with opened(path) as file:
        data = file.read(DOCUMENT_BYTES + 1)
    if len(data) > DOCUMENT_BYTES:
        raise UserError(
            f"{path}: one JSON document of more than {DOCUMENT_BYTES:,} bytes; write its rows as JSON lines (.jsonl)"
        )
    return data.removeprefix(codecs.BOM_UTF8)


def _is_object(line: bytes) -> bool:
    return _parsed(line) is not None


def _object(data: bytes) -> _Object:
    return _parsed(data) or _Object()


def _parsed(data: bytes) -> _Object | None:
    """Returns the object that the JSON is; None for anything else, whose fault `decode` reports."""
    try:
        return msgspec.json.decode(data, type=_Object)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def text_stream(file: io.BufferedReader) -> IO[str]:
    """Returns an open file as text whose line ends stay as they are."""
    return cast(IO[str], io.TextIOWrapper(file, "utf-8-sig", newline=""))
