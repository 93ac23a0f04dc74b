"""Record of one checkpoint: what the arrays belong to, and size and SHA-256 of every file, under its own hash."""

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from lw_jax.core import schema, tree
from lw_jax.core.errors import UserError
from lw_jax.core.files import measure
from lw_jax.core.types import Tree

RECORD = "record.json"
BEST = "nll"  # the metric that decides the best checkpoint; lower is better
VERSION = 1  # of the record
_CONTENT = ("train", "validation")  # hashes of data in an identity: a resumed run has them, a reader may not
_TIMES = "_CHECKPOINT_METADATA"  # orbax adds the time of the commit to it afterwards; reading needs nothing of it

# What is not there, or is a folder where a file belongs, is damage; every other OSError may pass (NFS, too many files).
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

_Size = Annotated[int, msgspec.Meta(ge=0)]
_File = Annotated[str, msgspec.Meta(pattern=r"^[^\x00\ud800-\udfff]+$")]  # a path that a file system accepts


class _Record(TypedDict):
    """Content of record.json, beside its hash."""

    version: int
    step: _Size
    identity: dict[str, str]
    data: dict[str, Any]
    metrics: dict[str, float | None]
    leaves: dict[str, tuple[list[_Size], str]]  # shape and dtype
    files: dict[_File, tuple[_Size, str]]  # bytes and SHA-256


@dataclasses.dataclass(frozen=True)
class Damage:
    """The reason why a record that was read is not usable."""

    reason: str


def scores(records: dict[int, dict[str, Any]]) -> dict[int, float]:
    """Returns step -> finite score, of the checkpoints that have one."""
    nlls = {step: record["metrics"].get(BEST) for step, record in records.items()}
    return {step: value for step, value in nlls.items() if value is not None and math.isfinite(value)}


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write_record(path: Path, record: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump({"sha256": _digest(record), "record": record}, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def measure_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Returns path -> (bytes, SHA-256) of a checkpoint's files."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _TIMES)
    return {str(path.relative_to(folder)): measure(path) for path in files}


def read_record(path: Path) -> dict[str, Any] | Damage | UserError:
    """Returns the record of record.json, typed as `_Record`, its damage, or the refusal where it cannot be read.

    Raises UserError where it is whole and of another version.
    """
    try:
        content = json.loads(path.read_bytes())
    except _ABSENT as error:
        return Damage(_absence(path.name, error))
    except OSError as error:
        return _unread_error(path.parent, error)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deeply
        return Damage(f"{path.name} is broken: {error}")
    if not isinstance(content, dict) or content.get("sha256") != _digest(content.get("record", {})):
        return Damage(f"{path.name} does not fit its own hash")
    version = content["record"].get("version") if isinstance(content.get("record"), dict) else VERSION
    if type(version) is not int or version != VERSION:
        rule = f"this program reads version {VERSION}; use the program that wrote it, or name another --workdir"
        raise UserError(f"{path}: version={version!r:.80}: {rule}")
    try:
        schema.convert(content.get("record"), _Record, where=path.name, remedy="it is no record of a checkpoint")
    except UserError as error:
        return Damage(str(error))
    return content["record"]


def find_damage(folder: Path, files: dict[str, list[Any]]) -> str:
    """Returns the first fault of the files that a record lists, or an empty string.

    Raises UserError where one cannot be read.
    """
    for name, (size, sha256) in files.items():
        path = folder / name
        try:
            length, digest = measure(path)
            if length != size:
                return f"{name} has {length} of {size} bytes"
            if digest != sha256:
                return f"{name} is not what was written"
        except _ABSENT as error:
            return _absence(name, error)
        except OSError as error:
            if is_gone(folder):
                return _absence(name, error)
            raise _unread_error(folder, error) from error
    return ""


def _absence(name: str, error: OSError) -> str:
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} is no file: {error.strerror}"


def is_gone(folder: Path) -> bool:
    """Returns whether a folder has been removed; False where that is not known."""
    try:
        folder.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _unread_error(folder: Path, error: OSError) -> UserError:
    """Returns the refusal of a checkpoint of which a file cannot be read: an older one is not taken in its place."""
    return UserError(
        f"{error.filename or folder}: cannot be read ({error.strerror}), and checkpoint {folder.name} may be whole; "
        f"start the same command again when it can be read, or move {folder} away to go on without it"
    )


def check_identity(path: Path, saved: dict[str, str], own: dict[str, str]) -> None:
    """Refuses a checkpoint of another identity; a reader's own may be without the content of the data."""
    for key in sorted(own.keys() | (saved.keys() - set(_CONTENT))):
        there, here = saved.get(key, "(absent)"), own.get(key, "(absent)")
        if there != here:
            made = "data" if key in _CONTENT else "configuration" if key == "config" else "models"
            raise UserError(
                f"{path.parent}: checkpoint {path.name} was made with {key}={there}, this run has {key}={here}; give "
                f"another --workdir, or use the {made} that made it"
            )


def check_leaves(path: Path, saved: dict[str, list[Any]], state: dict[str, Tree]) -> None:
    wanted = {name: [list(x.shape), str(x.dtype)] for name, x in tree.flatten_paths(state).items()}
    saved = {name: leaf for name, leaf in saved.items() if name.split("/")[0] in state}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            there, here = (_describe_leaf(leaves.get(name)) for leaves in (saved, wanted))
            raise UserError(
                f"{path.parent}: checkpoint {path.name} holds {name} {there}, this run wants {here}; give another "
                "--workdir, or use the configuration that made it"
            )


def _describe_leaf(leaf: list[Any] | None) -> str:
    return "(absent)" if leaf is None else f"{tuple(leaf[0])} {leaf[1]}"
