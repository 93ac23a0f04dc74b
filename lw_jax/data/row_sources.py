"""Rows of tables, each as a typed value: JSON, parquet and Arrow files, folders of them, saved data sets, the hub.

The one reader of rows for every recipe. A field may stand in a column of another name (`data.columns`). Files are read
in batches of rows, and of parquet and Arrow only the columns that are needed.
"""

import contextlib
import filecmp
import importlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lw_jax.core.errors import UserError
from lw_jax.core.files import expand
from lw_jax.data import rows
from lw_jax.data.row_fields import Fields, warn_once, warn_unread

HUB = "hub:"
SUFFIXES = (".parquet", ".arrow")
_SHOWN = 5  # files in a message
BATCH = 128  # rows of a file in memory at once
# What a split's name begins with: it distinguishes one from a configuration of the hub, and finds it in names of files.
_SPLIT = re.compile(r"(?:train|valid|val|validation|dev|test)(?![a-z])", re.ASCII)
_SPLIT_WITHIN = re.compile(rf"(?<![a-z]){_SPLIT.pattern}", re.ASCII)  # of a name in lower case
_SHARD = re.compile(r"(?:[-_.]\d+(?:-of-\d+)?(?:-[0-9a-f]{8,})?)?$")  # ends the name of one of several files
_NUMBERED = re.compile(r"[-_.](\d+)-of-(\d+)(?=[-_.]|$)")  # in the name of one of so many files
_HUB_FORM = "hub:NAME[:CONFIG][:SPLIT][@REVISION]"
_COMMAS = "name the files with commas between"

_T = TypeVar("_T")


class Unreachable(UserError):
    """The source cannot be read now."""


def read(
    source: str, fields: Fields[_T], *, split: str, stream: bool = False, document: type[Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields (place, row) of one source in its order.

    Args:
        source: a file of JSON lines or a JSON array (also .gz), a .parquet or .arrow file, a folder of them or of
            datasets.save_to_disk, each folder also as FOLDER:SPLIT, or "hub:NAME[:CONFIG][:SPLIT][@REVISION]".
        split: taken where the source has several and names none.
        stream: read a data set of the hub over the network, instead of a copy on the disk.
        document: as `rows.read`; it has no columns and is yielded whole.

    Raises:
        UserError: names file or split, row, field, value, rule and remedy.
        Unreachable: the hub does not answer, or has no such data set.
    """
    where = label(source, split)
    with fields.counted(where) as counted:
        if source.startswith(HUB):
            data_set = ask_hub("load_dataset", source, split=parse_hub(source, split)[2], streaming=stream)
            yield from _read_set(data_set, counted, where)
        elif is_saved(locate(source)[0]):
            yield from _read_set(_load_saved(source, split), counted, where)
        elif is_table(source):
            for file in files(source, split):
                yield from _read_file(file, counted)
        else:
            yield from _json_rows(expand(source), counted, document)


def is_table(source: str) -> bool:
    """Returns True for what is read by a library, not as text: parquet, Arrow, folders and the hub."""
    return source.startswith(HUB) or Path(source).suffix in SUFFIXES or os.path.isdir(locate(source)[0])


def is_here(source: str) -> bool:
    return not source.startswith(HUB) and os.path.exists(locate(source)[0])  # False where a name is too long


def locate(source: str) -> tuple[Path, str]:
    """Returns the path of a local source, and the split that FOLDER:SPLIT names."""
    path = expand(source)
    folder, colon, named = source.rpartition(":")
    if colon and not os.path.exists(path) and os.path.isdir(expand(folder)):
        return expand(folder), named
    return path, ""


def split_sources(source: str) -> list[str]:
    """Returns the names in a list of sources; a file or folder whose own name has commas is one source.

    Raises UserError for a list with an empty name.
    """
    names = [source] if is_here(source) else [name.strip() for name in source.split(",")]
    if len(names) > 1 and not all(names):
        raise UserError(f"{source!r}: an empty name between commas; name each file or folder once")
    return names


def label(source: str, split: str) -> str:
    """Returns a source with the split that is read of it, where it has several."""
    if source.startswith(HUB):
        name, subset, chosen, revision = parse_hub(source, split)
        return ":".join(filter(None, (f"{HUB}{name}", subset, chosen))) + f"@{revision}" * bool(revision)
    path, named = locate(source)
    return f"{path}:{named or split}" if path.is_dir() and _splits(path) else str(path)


def check_apart(train: str, validation: str, *, beside: Collection[str] = ()) -> None:
    """Raises UserError where a validation source has files, or a split of the hub, of a training source.

    A copy of a training file is warned of: who measures memory on purpose makes one. `beside`: as of `files`.
    """
    trained = split_sources(train)
    for name in split_sources(validation):
        if any(_overlap(source, name, beside) for source in trained):
            raise UserError(
                f"config.data.validation={name!r} is the training source, or a part of it: scores would measure "
                "memory; name another file or split"
            )


def parse_hub(source: str, split: str) -> tuple[str, str, str, str]:
    """Returns (name, configuration, split, revision) of a data set of the hub; `split` where it names none."""
    whole, separator, revision = source.removeprefix(HUB).partition("@")
    name, *parts = re.split(r":(?![^\[]*\])", whole)  # a slice "train[:90%]" stays whole
    if not name or len(parts) > 2 or (separator and not re.fullmatch(r"[\w./-]+", revision)):
        raise UserError(f"{source!r}: expected {_HUB_FORM}")
    if len(parts) == 1:  # one word: a split when it begins like one, else a configuration
        parts = ["", parts[0]] if _SPLIT.match(parts[0]) else [parts[0], split]
    subset, chosen = parts or ("", split)
    return name, subset, chosen or split, revision


def is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def files(source: str, split: str, *, beside: Collection[str] = ()) -> list[Path]:
    """Returns the parquet and Arrow files of a source in the order of their names; of a folder those of one split.

    A split is what the name of a file or of a folder in it begins with, as the hub names them:
    data/validation-00000-of-00002.parquet. Without such names the folder is one table; it is one text where it has
    files of the suffixes `beside`, too.
    """
    path, named = locate(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        rule = f"name a file, a folder of them or of datasets.save_to_disk, or {_HUB_FORM}"
        raise UserError(f"{path}: no such file or folder (seen from {Path.cwd()}); {rule}")
    remedy = "name one of its files or folders" if beside else _COMMAS  # a text is one source
    known = (*SUFFIXES, *beside)
    here = walk(path, known)
    matches = [file for file in here if suffix_of(file) in known]
    tables = [file for file in matches if suffix_of(file) in SUFFIXES]
    if tables and not beside and (rows_beside := [file for file in here if suffix_of(file) == ".jsonl"]):
        raise UserError(f"{rows_beside[0]}: stands in a folder of tables, which alone are read; {_COMMAS}")
    if matches and (unread := [file.relative_to(path).as_posix() for file in here if suffix_of(file) not in known]):
        warn_unread(str(path), unread, _SHOWN, f"; of a folder {', '.join(known)} are")
    if not named and len(tables) < len(matches):
        if len(several := {_split_of(file.relative_to(path)) for file in matches} - {""}) > 1:
            raise UserError(
                f"{path}: has files of the splits {', '.join(sorted(several))}, not of tables alone; {remedy}"
            )
        return _check_shards(path, matches, several=True)
    if not tables:
        wanted = ", ".join(SUFFIXES if named else (*SUFFIXES, *beside))
        raise UserError(f"{path}: is a directory without {wanted} files; name another, or a file")
    splits = {file: _split_of(file.relative_to(path)) for file in tables}
    if not any(splits.values()) and not named:
        names = " ".join(file.relative_to(path).as_posix().lower() for file in tables)
        if len(within := set(_SPLIT_WITHIN.findall(names))) > 1:
            raise UserError(
                f"{path}: has files of {', '.join(sorted(within))}, whose names do not begin with the split as the "
                f"hub's do (train-00000.parquet), and which would be read as one table; {remedy}"
            )
        return _check_shards(path, tables, several=bool(beside))
    if odd := next((file for file, name in splits.items() if not name and any(splits.values())), None):
        raise UserError(f"{odd}: its name has no split, others in {path} have one; {remedy}")
    chosen = [file for file, name in splits.items() if name == (named or split)]
    if not chosen:
        raise _no_split(path, named or split, splits.values())
    return _check_shards(path, chosen, several=bool(beside))


def _check_shards(folder: Path, files: list[Path], *, several: bool) -> list[Path]:
    """Returns the files; warns of missing ones, by the numbers in their names, and refuses those of two tables.

    `several`: files of several tables are one text.
    """
    sets: dict[tuple[str, str], dict[int, Path]] = {}
    for file in files:
        if match := _NUMBERED.search(file.name):
            name = f"{file.parent}/" * several + file.name[: match.start()]
            other = sets.setdefault((name, match[2]), {}).setdefault(int(match[1]), file)
            if other != file and not several:
                one, two = (path.relative_to(folder).as_posix() for path in (other, file))
                raise UserError(
                    f"{folder}: {one} and {two} are the same part of two tables, which would be read as one; name the "
                    f"folder of one of them, or {_COMMAS}"
                )
    for (name, count), there in sets.items():
        if len(there) < int(count):
            files_of = f"{int(count)} files {name}-*-of-{count}"
            warn_once(f"{folder}: {len(there)} of the {files_of} are there; they alone are read")
    return files


def walk(folder: Path, known: Collection[str]) -> list[Path]:
    """Returns the files below a folder in the order of their names, those behind links too; none hidden.

    A folder that links lead to again is not read again, and this is reported. A link to nothing is returned where its
    suffix is not one of those `known`, so that it can be told. Raises UserError for one that may be data. A folder
    that cannot be read is reported: the root of a disk has one, lost+found.
    """
    found: list[Path] = []
    read: set[str] = set()
    tops = [folder]
    for top in tops:  # it grows: what is behind links comes after all else, so that it is never read in its place
        for name, folders, names in os.walk(top, onerror=_warn_folder):
            place, real = Path(name), os.path.realpath(name)
            if real in read:
                warn_once(f"{place}: a link to a folder that is read already, {real}; it is not read again")
                folders.clear()
                continue
            read.add(real)
            folders[:] = sorted(one for one in folders if one[0] != ".")
            tops += [place / one for one in folders if os.path.islink(place / one)]
            found += [place / one for one in names if one[0] != "."]
    for file in found:
        if os.path.isfile(file):
            continue
        if os.path.islink(file) and suffix_of(file) in ("", *known):  # without a suffix, perhaps to a folder
            raise UserError(f"{file}: a link to {os.readlink(file)}, which cannot be read; correct or remove it")
        if suffix_of(file) in known:
            raise UserError(f"{file}: no file that can be read; correct or remove it")
    files = (file for file in found if os.path.isfile(file) or os.path.islink(file))
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def suffix_of(file: Path) -> str:
    """Returns the suffix of a file's format, without .gz."""
    return Path(file.name.removesuffix(".gz")).suffix


# --- files


def _json_rows(path: Path, fields: Fields[_T], document: type[Any] | None) -> Iterator[tuple[str, Any]]:
    if suffix_of(path) in (".csv", ".tsv"):
        raise UserError(f"{path}: a CSV file has neither types nor lists; write its rows as .jsonl or .parquet")
    for where, row in rows.read(path, remedy=fields.remedy, document=document):
        yield where, fields.convert(row, where) if isinstance(row, dict) else row


def _read_file(path: Path, fields: Fields[_T]) -> Iterator[tuple[str, _T]]:
    def loaded() -> Iterator[Mapping[str, Any]]:
        with _opened(path, fields) as batches:
            for batch in batches:
                yield from map(_as_json(batch.schema, fields, parse=True), batch.to_pylist())

    yield from _typed(loaded(), fields, str(path), _import("pyarrow", str(path)).ArrowException)


@contextlib.contextmanager
def _opened(path: Path, fields: Fields[Any]) -> Iterator[Iterable[Any]]:
    """Opens a file as record batches of the needed columns, without holding more of it than a group of rows."""
    if path.suffix == ".parquet":
        parquet = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            chosen = fields.choose(file.schema_arrow.names, str(path))
            yield file.iter_batches(BATCH, columns=chosen or None, use_threads=False)
        return
    arrow, ipc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.ipc")
    with arrow.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"  # the other of Arrow's two formats, the stream, is what datasets writes
        file.seek(0)
        with ipc.open_file(file) if is_file else ipc.open_stream(file) as reader:
            chosen = fields.choose(reader.schema.names, str(path)) or reader.schema.names
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            yield (part for batch in batches for part in _parts(batch.select(chosen)))


def _parts(batch: Any) -> Iterator[Any]:
    batch.validate(full=True)  # Arrow trusts a file's offsets: a damaged one would end the process
    return (batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH))


def _warn_folder(error: OSError) -> None:
    warn_once(f"{error.filename}: not read: a folder without permission to read it ({error.strerror})")


def _split_of(file: Path) -> str:
    """Returns the split that the name of a file, or of the nearest folder, begins with; else an empty string."""
    for name in (Path(file.name.removesuffix(".gz")).stem, *file.parts[-2::-1]):
        if _SPLIT.match(name):
            return _SHARD.sub("", name)
    return ""


# --- data sets


def ask_hub(what: str, source: str, **options: Any) -> Any:
    """Returns what a function of `datasets` gives of a data set. Raises Unreachable where the hub does not answer."""
    name, subset, _, revision = parse_hub(source, "")
    datasets, yaml = _import("datasets", source), _import("yaml", source)
    try:
        return getattr(datasets, what)(name, subset or None, revision=revision or None, **options)
    # RuntimeError: a data set with a script; ImportError: a proxy of SOCKS; YAMLError: a damaged card
    except (OSError, ValueError, RuntimeError, ImportError, yaml.YAMLError, datasets.exceptions.DatasetsError) as error:
        raise Unreachable(
            f"{label(source, options.get('split', ''))}: could not be loaded: {error}; check name, configuration, "
            "split, revision and the network, or download files of it and name their folder"
        ) from error


def _load_saved(source: str, split: str) -> Any:
    path, named = locate(source)
    datasets = _import("datasets", source)
    try:
        data_set = datasets.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{path}: cannot be loaded ({error}); save the data set again") from error
    if not (path / "dataset_dict.json").is_file():
        if named:
            raise _no_split(path, named, ())
        return data_set
    if (named or split) not in data_set:
        raise _no_split(path, named or split, data_set)
    return data_set[named or split]


def _read_set(data_set: Any, fields: Fields[_T], where: str) -> Iterator[tuple[str, _T]]:
    known = data_set.column_names  # none where the library does not know them before the first row
    if known and (chosen := fields.choose(known, where)):
        data_set = data_set.select_columns(chosen)
    datasets, arrow = _import("datasets", where), _import("pyarrow", where)
    schema = data_set.features.arrow_schema if data_set.features else arrow.schema([])
    records = map(_as_json(schema, fields, parse=False), data_set)
    yield from _typed(records, fields, where, datasets.exceptions.DatasetsError, arrow.ArrowException)


def _as_json(schema: Any, fields: Fields[Any], *, parse: bool) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns what makes of a row of an Arrow schema one as a file of JSON would have it.

    Arrow gives the objects of a column the fields of all of them, and keeps what has no common type as JSON text, to
    `parse`.
    """

    def convert(value: Any, kind: Any) -> Any:
        if value is not None and getattr(kind, "extension_name", "") == "arrow.json":
            return json.loads(value) if parse else value
        if isinstance(value, list) and hasattr(kind, "value_type"):
            return [convert(item, kind.value_type) for item in value]
        if not (isinstance(value, dict) and kind.num_fields):
            return value
        parts = {name: (item, kind.field(name).type) for name, item in value.items()}
        return {name: convert(*part) for name, part in parts.items() if part[0] is not None or not fields.sparse}

    kinds = dict(zip(schema.names, schema.types, strict=True))
    return lambda row: {name: convert(value, kinds[name]) if name in kinds else value for name, value in row.items()}


def _typed(
    records: Iterable[Mapping[str, Any]], fields: Fields[_T], where: str, *errors: type[Exception]
) -> Iterator[tuple[str, _T]]:
    """Yields (place, row) of what a library reads lazily, so that its errors come with any row."""
    number = 0
    try:
        for row in records:
            named = f"{where}[{number}]"
            yield named, fields.convert(row, named)
            number += 1
    except UserError:
        raise
    except (OSError, ValueError, *errors) as error:
        raise UserError(
            f"{where}: cannot be read beyond {number} rows ({error}); fetch or write the data again"
        ) from error


# --- names


def _overlap(train: str, validation: str, beside: Collection[str]) -> bool:
    """Returns whether two sources have rows in common, as far as their names tell; warns of copies of files."""
    if train.startswith(HUB) != validation.startswith(HUB):
        return False
    if not train.startswith(HUB):
        ours, theirs = _rows_of(train, "train", beside), _rows_of(validation, "validation", beside)
        for path, other in itertools.product(ours, theirs - ours):
            if _is_copy(path, other):
                warn_once(f"{other}: held-out data, a copy of the training data {path}: its scores measure memory")
        return not ours.isdisjoint(theirs)
    (*name, split, revision), (*named, other, pinned) = parse_hub(train, "train"), parse_hub(validation, "validation")
    if name != named or (revision and pinned and revision != pinned):
        return False
    return any(_splits_overlap(ours, theirs) for ours in split.split("+") for theirs in other.split("+"))


def _is_copy(path: str, other: str) -> bool:
    if not (os.path.isfile(path) and os.path.isfile(other)):
        return False
    return os.path.getsize(path) == os.path.getsize(other) > 0 and filecmp.cmp(path, other, shallow=False)


def _splits_overlap(split: str, other: str) -> bool:
    # Of two slices of one split, train[:90%] and train[90%:], only the same one is known to overlap.
    whole = any(part == part.partition("[")[0] for part in (split, other))
    return split.partition("[")[0] == other.partition("[")[0] if whole else split == other


def _rows_of(source: str, split: str, beside: Collection[str]) -> set[str]:
    path, named = locate(source)
    if is_saved(path):
        return {os.path.realpath(path / (named or split) if _splits(path) else path)}
    if not os.path.isdir(path):
        return {os.path.realpath(path)}
    return {os.path.realpath(file) for file in files(source, split, beside=beside)}


def _splits(folder: Path) -> bool:
    if is_saved(folder):
        return (folder / "dataset_dict.json").is_file()
    return any(_split_of(file.relative_to(folder)) for file in walk(folder, SUFFIXES) if suffix_of(file) in SUFFIXES)


def _no_split(path: Path, split: str, known: Iterable[str]) -> UserError:
    here = ", ".join(sorted({repr(name) for name in known if name})) or "none"
    return UserError(f"{path}: no split {split!r}, here are {here}; name one of them: {path}:SPLIT")


def _import(package: str, source: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{source!r} needs the package {package!r} ({error}): pip install datasets, or name a file of JSON lines"
        ) from error
