"""Rows of text files, streamed and typed: JSON lines, a JSON array or document, paragraphs; gzipped or not."""

import codecs
import contextlib
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from lw_jax.core import schema
from lw_jax.core.errors import UserError

ROW_BYTES = 64 << 20  # of one line of .jsonl
DOCUMENT_BYTES = 1 << 30  # of JSON that is one document and is decoded at once; HotpotQA's training file has 540 MB
_SHOWN = 12  # bytes of what is no JSON, in a message


class Text(msgspec.Struct, frozen=True):
    """A row of a passage file or of a corpus."""

    text: str


class _Object(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw(b"")  # skipped, whatever it holds


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    """Opens a file, gzipped or not. Raises UserError where it is missing or unreadable, also while it is read."""
    try:
        with path.open("rb") as raw:
            yield gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file (seen from {Path.cwd()}); name another, also .gz") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: broken gzip data ({error}); fetch or compress the file again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); convert it to UTF-8") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); fix its permissions or name another file"
        ) from error


@contextlib.contextmanager
def opened_text(path: Path) -> Iterator[IO[str]]:
    """Opens a file as `opened` does, as text whose line ends stay as they are."""
    with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="\n") as text:
        yield text


def paragraphs(path: Path) -> Iterator[str]:
    """Yields the parts of a text file between blank lines, stripped."""
    with opened_text(path) as file:
        for blank, part in itertools.groupby(file, lambda line: not line.strip()):
            if not blank:
                yield "".join(part).replace("\r\n", "\n").strip()


def read(path: Path, *, remedy: str, document: type[Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields (place, object) of a file of JSON lines, of a JSON array, or of one row; by its content, not its name.

    `document` is the type of a file that is one object with an array "data"; it is yielded whole. Raises UserError
    naming file, row, field, value, rule and `remedy`: what the rows should look like.
    """
    named = ".jsonl" in path.suffixes
    with opened(path) as file:
        lines = _lines(file, path, ROW_BYTES if named else DOCUMENT_BYTES)
        number, first = next(lines, (0, b""))
        if not first:
            raise UserError(f"{path}: the file is empty; {remedy}")
        if first.lstrip()[:1] not in (b"{", b"["):
            raise UserError(
                f"{path}:{number}: begins with {first[:_SHOWN]!r}: neither an object nor an array of JSON; write its "
                f"rows as JSON in UTF-8, plain or gzipped; {remedy}"
            )
        listed, head = first.lstrip()[:1] == b"[", _parsed(first)
        following = list(itertools.islice(lines, 1)) if _has_rows(head) else []  # a document has one line or no head
        if not listed and (named or head) and (document is None or following or not _has_rows(head)):
            for place, line in itertools.chain([(number, first)], following, lines):
                where = f"{path}:{place}"
                yield where, schema.decode(line, dict[str, Any], where=where, remedy=remedy)
            return
        data = first + file.read(DOCUMENT_BYTES)
    if len(data) > DOCUMENT_BYTES:
        raise UserError(
            f"{path}: one JSON document of more than {DOCUMENT_BYTES:,} bytes; write its rows as JSON lines (.jsonl)"
        )
    if listed:
        rows = schema.decode(data, list[dict[str, Any]], where=str(path), remedy=remedy)
        yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))
    elif document is not None and _has_rows(_parsed(data)):
        yield str(path), schema.decode(data, document, where=str(path), remedy=remedy)
    else:
        where = f"{path}:{number}"
        yield where, schema.decode(data, dict[str, Any], where=where, remedy=remedy)


def _lines(file: IO[bytes] | gzip.GzipFile, path: Path, limit: int) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(iter(lambda: file.readline(limit + 1), b""), 1):
        if len(line) > limit:
            raise UserError(f"{path}:{number}: a line of more than {limit:,} bytes; split or remove it")
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            yield number, line


def _has_rows(parsed: _Object | None) -> bool:
    return parsed is not None and memoryview(parsed.data)[:1] == b"["


def _parsed(data: bytes) -> _Object | None:
    """Returns the object that the JSON is; None for anything else, whose fault `decode` reports."""
    try:
        return msgspec.json.decode(data, type=_Object)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
