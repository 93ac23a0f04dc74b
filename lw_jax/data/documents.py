"""Documents of a text corpus, streamed: from files, folders, tables, the hub, or Python's own documentation strings.

It knows no tokenizer. No more than a row or a few pieces of a text lie in memory.
"""

import ast
import hashlib
import importlib
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.data import rows

PIECE = 1 << 18  # characters of a long text read at once: several of them keep all cores busy
HASHED_WHOLE = 64 << 20  # bytes; of a larger source each file is hashed at three places
SAMPLE = 64 << 10  # bytes at each of them
DOCSTRINGS = "docstrings"
_PLAIN, _TABLES = (".txt", ".jsonl"), (".arrow", ".parquet")
_NO_DOCUMENTS = ("test", "tests", "site-packages", "dist-packages", "idlelib", "idle_test", "__pycache__")
_ROW = 'a document is a row {"text": "..."}; mend the row or rename the field of its text'
_KNOWN = (
    "a .txt or .jsonl file (also .gz), an .arrow or .parquet file, a folder of them, a folder of "
    f'datasets.save_to_disk, "hub:NAME", "hub:NAME:CONFIG" or "{DOCSTRINGS}"'
)


class Piece(NamedTuple):
    """A part of a document; long texts come in several. A document without text is one piece without text."""

    text: str
    ends: bool  # it is the document's last


class Unreachable(UserError):
    """The source cannot be read now; a corpus packed from it before may still be used."""


def read(source: str) -> Iterator[Piece]:
    """Yields the documents of a source in order, a function of its content alone.

    A .txt file is one document, a row {"text": ...} of .jsonl, .arrow, .parquet or a data set is one. Of a data set
    the split "train" is read. "docstrings" are the documentation strings of the Python that is running, a document a
    module: real text that is on every machine, but it differs between Python versions.

    Raises:
        UserError: naming file and line of a broken row, what is missing, or the kinds of source that are known.
    """
    if source == DOCSTRINGS:
        for file in _modules():
            if text := "\n\n".join(_docstrings(file)):
                yield Piece(text, True)
    elif source.startswith("hub:"):
        builder = _builder(source)
        yield from _table(source, lambda: builder.as_streaming_dataset(split="train"))
    elif _is_saved(path := Path(source).expanduser()):
        yield from _table(source, lambda: _saved_rows(path))
    else:
        for file in _files(path):
            yield from _read_file(file)


def identify(source: str) -> list[Any]:
    """Returns, as JSON values, what a source is: as long as they are equal, `read` gives the same.

    Raises:
        Unreachable: the hub does not answer.
        UserError: what is missing.
    """
    if source == DOCSTRINGS:
        said = hashlib.blake2b(digest_size=16)
        for file in _modules():
            said.update(file.read_bytes())
        return [source, sys.version, said.hexdigest()]
    if source.startswith("hub:"):
        return [source, str(_builder(source).hash)]
    path = Path(source).expanduser()
    saved = _is_saved(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in (".arrow", ".json")) if saved else _files(path)
    whole = sum(file.stat().st_size for file in files) < HASHED_WHOLE
    return [[_name_in(path, file), *_identify_file(file, whole)] for file in files]


# --- files


def _files(path: Path) -> list[Path]:
    """Returns the files of a path in the order of their names; hidden ones are left out."""
    if path.is_file():
        if not _kind(path):
            raise UserError(f"{path}: unknown kind of file; name {_KNOWN}")
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder (seen from {Path.cwd()}); name {_KNOWN}")
    found = [file for file in path.rglob("*") if file.is_file() and _kind(file)]
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not found:
        raise UserError(f"{path}: no file of text in this folder; name {_KNOWN}")
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _kind(path: Path) -> str:
    """Returns the suffix of a file's format, or an empty string."""
    plain = Path(path.name.removesuffix(".gz")).suffix
    return plain if plain in _PLAIN else path.suffix if path.suffix in _TABLES else ""


def _name_in(path: Path, file: Path) -> str:
    return file.name if file == path else file.relative_to(path).as_posix()


def _identify_file(file: Path, whole: bool) -> list[Any]:
    """Returns size and hash of a file; where only three places of it are hashed, also when it was changed."""
    stat, said = file.stat(), hashlib.blake2b(digest_size=16)
    whole = whole or stat.st_size <= 3 * SAMPLE
    with file.open("rb") as content:
        if whole:
            return [stat.st_size, hashlib.file_digest(content, lambda: said).hexdigest()]
        for start in (0, (stat.st_size - SAMPLE) // 2, stat.st_size - SAMPLE):
            content.seek(start)
            said.update(content.read(SAMPLE))
    return [stat.st_size, said.hexdigest(), stat.st_mtime_ns]


def _read_file(path: Path) -> Iterator[Piece]:
    kind, name = _kind(path), str(path)
    if kind in _TABLES:
        yield from _table(name, lambda: _table_rows(path, kind[1:]))
        return
    with rows.opened(path) as content:
        if kind == ".txt":
            with rows.text_stream(content) as text:
                yield from _cut(text)
            return
        for number, line in rows.lines(content, path):
            yield Piece(rows.decode(line, rows.Text, where=f"{name}:{number}", remedy=_ROW).text, True)


def _cut(text: IO[str]) -> Iterator[Piece]:
    """Yields a text in pieces that end with a line; where a line is longer than a piece, with a word."""
    held = text.read(PIECE)
    while more := text.read(PIECE):
        at = held.rfind("\n") + 1 or max(held.rfind(" "), 0) or len(held)
        yield Piece(held[:at], False)
        held = held[at:] + more
    yield Piece(held, True)


# --- tables


def _table(where: str, opened: Callable[[], Iterable[Any]]) -> Iterator[Piece]:
    """Yields a document a row of what `opened()` gives; it is read lazily, so errors come with any row."""
    datasets = _import(where)
    try:
        for number, row in enumerate(opened()):
            named = f"{where}[{number}]"
            text = schema.convert(row, rows.Text, where=named, remedy=_ROW).text
            yield Piece(schema.encodable(text, where=f"{named}: text", remedy=_ROW), True)
    except UserError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f'{where}: the column "text" of its rows cannot be read ({error}); fetch or write the data again'
        ) from error


def _table_rows(path: Path, kind: str) -> Iterable[Any]:
    found = _import(str(path)).load_dataset(kind, data_files=str(path), split="train", streaming=True)
    return found.select_columns(["text"])


def _is_saved(path: Path) -> bool:
    """Returns True for a folder of datasets.save_to_disk."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved_rows(path: Path) -> Iterable[Any]:
    found = _import(str(path)).load_from_disk(str(path))
    if (path / "dataset_dict.json").is_file():
        if "train" not in found:
            raise UserError(f'{path}: no split "train", here are {sorted(found)}; name the folder of one of them')
        found = found["train"]
    return found.select_columns(["text"])


def _builder(source: str) -> Any:
    name, *rest = source.removeprefix("hub:").split(":")
    if not name or len(rest) > 1:
        raise UserError(f"{source!r}: expected hub:NAME or hub:NAME:CONFIG; the split train is read")
    datasets = _import(source)
    try:
        return datasets.load_dataset_builder(name, *rest)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise Unreachable(
            f"{source!r}: could not be loaded: {error}; check the names and the network, or download files of it and "
            "name their folder"
        ) from error


def _import(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{source!r} needs the package 'datasets' ({error}): pip install datasets, or name .txt or .jsonl files"
        ) from error


# --- Python's own documentation


def _modules() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = [root / file for file in found if not any(part in _NO_DOCUMENTS for part in file.parts)]
    if not kept:
        raise UserError(f'{root}: this Python has no standard library there to read "{DOCSTRINGS}" from; name files')
    return sorted(kept, key=lambda file: file.relative_to(root).as_posix())


def _docstrings(file: Path) -> Iterator[str]:
    """Yields the documentation strings of a module, its classes and functions in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another's code
        tree = ast.parse(file.read_bytes(), str(file))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inner = sorted((n for n in ast.walk(tree) if isinstance(n, kinds)), key=lambda n: (n.lineno, n.col_offset))
    for node in (tree, *inner):
        if found := ast.get_docstring(node, clean=False):
            yield inspect.cleandoc(found)
