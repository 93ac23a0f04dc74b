"""Documents of a text corpus, streamed: from files, folders, tables, the hub, or Python's own documentation strings.

It knows no tokenizer. No more than a row or a few pieces of a text lie in memory.
"""

import ast
import hashlib
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from lw_jax.core.errors import UserError
from lw_jax.core.validation import DOCSTRINGS
from lw_jax.data import row_sources, rows
from lw_jax.data.row_fields import Fields
from lw_jax.hub import sources

PIECE = 1 << 18  # characters of a long text read at once: several of them keep all cores busy
LARGE = 64 << 20  # bytes of a file whose hash is kept for the next start
TEXT = ".txt"
PLAIN = (TEXT, ".jsonl")
_SAVED = (".arrow", ".json")  # of datasets.save_to_disk
_NO_DOCUMENTS = ("test", "tests", "site-packages", "dist-packages", "idlelib", "idle_test", "__pycache__")
_ROW = 'a document is a row {"text": "..."}; correct the row'


class Piece(NamedTuple):
    """A part of a document; long texts come in several. A document without text is one piece without text."""

    text: str
    ends: bool  # it is the document's last


def read(source: str, split: str = "train", columns: Sequence[str] = ()) -> Iterator[Piece]:
    """Yields the documents of a source in order, a function of its content alone.

    A .txt file is one document, a row {"text": ...} of .jsonl, .arrow, .parquet or a data set is one. `split` is as in
    `row_sources.read`, `columns` is data.columns. "docstrings" are the documentation strings of the Python that is
    running, a document a module: real text that is on every machine, but it differs between Python versions. Raises
    UserError naming file and line of a broken row, what is missing, or the kinds of source that are known.
    """
    fields = Fields.of(rows.Text, columns, _ROW)
    if source == DOCSTRINGS:
        for file in _modules():
            if text := "\n\n".join(_docstrings(file)):
                yield Piece(text, True)
        return
    for path in [source] if _is_set(source) else map(str, _files(source, split)):
        if row_sources.suffix_of(Path(path)) == TEXT:
            with rows.opened_text(Path(path)) as text:
                yield from _cut(text)
        else:
            for _, row in row_sources.read(path, fields, split=split, stream=True):
                yield Piece(row.text, True)


def identify(source: str, split: str = "train", columns: Sequence[str] = ()) -> list[Any]:
    """Returns, as JSON values, what a source is: as long as they are equal, `read` gives the same.

    Raises Unreachable where the hub does not answer, UserError naming what is missing.
    """
    if source == DOCSTRINGS:
        digest = hashlib.blake2b(digest_size=16)
        for file in _modules():
            digest.update(file.read_bytes())
        return [source, sys.version, digest.hexdigest()]
    path, named = row_sources.locate(source)
    selection = [*columns, *([named or split] if _is_set(source) and (named or split) != "train" else [])]
    if source.startswith(row_sources.HUB):
        return [source, str(row_sources.ask_hub("load_dataset_builder", source).hash), *selection]
    if row_sources.is_saved(path):
        files = sorted(file for file in row_sources.walk(path, _SAVED) if file.suffix in _SAVED)
    else:
        files = _files(source, split)
    # A note a file pays for large ones; a folder may have very many small ones.
    hashes = [sources.file_hash(file, keep=file.stat().st_size >= LARGE) for file in files]
    names = (file.name if file == path else file.relative_to(path).as_posix() for file in files)
    return [*map(list, zip(names, hashes, strict=True)), *selection]


# --- files


def _is_set(source: str) -> bool:
    return source.startswith(row_sources.HUB) or row_sources.is_saved(row_sources.locate(source)[0])


def _files(source: str, split: str) -> list[Path]:
    """Returns the files of a path in the order of their names; of a folder of tables alone one split's."""
    files, known = row_sources.files(source, split, beside=PLAIN), (*PLAIN, *row_sources.SUFFIXES)
    if unknown := [file for file in files if row_sources.suffix_of(file) not in known]:
        raise UserError(f"{unknown[0]}: unknown kind of file; {', '.join(known)} are read, and {DOCSTRINGS!r}")
    return files


def _cut(text: IO[str]) -> Iterator[Piece]:
    """Yields a text in pieces that end with a line; where a line is longer than a piece, with a word."""
    buffer = text.read(PIECE)
    while more := text.read(PIECE):
        end = buffer.rfind("\n") + 1 or max(buffer.rfind(" "), 0) or len(buffer)
        yield Piece(buffer[:end], False)
        buffer = buffer[end:] + more
    yield Piece(buffer, True)


# --- Python's own documentation


def _modules() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = (file.relative_to(root) for file in root.rglob("*.py"))
    modules = [root / file for file in paths if not any(part in _NO_DOCUMENTS for part in file.parts)]
    if not modules:
        raise UserError(f'{root}: this Python has no standard library there to read "{DOCSTRINGS}" from; name files')
    return sorted(modules, key=lambda file: file.relative_to(root).as_posix())


def _docstrings(file: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another's code
        tree = ast.parse(file.read_bytes(), str(file))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inner = sorted((n for n in ast.walk(tree) if isinstance(n, kinds)), key=lambda n: (n.lineno, n.col_offset))
    for node in (tree, *inner):
        if docstring := ast.get_docstring(node, clean=False):
            yield inspect.cleandoc(docstring)
