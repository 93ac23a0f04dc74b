"""Run folder: configuration, command and versions of a run, its lock, and readers of its JSON lines."""

import dataclasses
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from ml_collections import ConfigDict

from lw_jax.core import schema
from lw_jax.core.config import Config, build, diff, meaning, to_dict
from lw_jax.core.errors import UserError
from lw_jax.core.files import nearest, write_whole
from lw_jax.training import wire_folder

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "flax", "optax", "orbax-checkpoint", "grain", "transformers"),
    *("tokenizers", "safetensors", "gguf", "ml_collections", "numpy"),
)

LOCK, EVAL_LOCK = "run.lock", "eval.lock"
EVALUATION = "eval.json"
VERSION = 1  # of config.json
_log = logging.getLogger(__name__)
_RESTORE = "the file must be as training wrote it: restore it"

_locks: dict[Path, int] = {}  # file descriptors of this process's locks
_Name = Annotated[str, msgspec.Meta(max_length=1000)]
# A log writes NaN and infinities as strings: JSON has no numbers for them.
_Value = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)] | float | Literal["nan", "inf", "-inf"] | None
_SHOWN = 3  # skipped lines of a file that are printed


def read_config(workdir: Path) -> Config:
    """Returns the configuration that `write_workdir` saved.

    Of a wire folder it is the configuration of the run that made it.

    Raises:
      UserError: the folder holds none, it cannot be read, or is of another version.
    """
    if wire_folder.is_wire(workdir):
        return wire_folder.read_config(workdir)
    file = workdir / "config.json"
    try:
        saved = schema.read(file, dict[str, Any], remedy=_RESTORE)
    except FileNotFoundError as error:
        rule = "no run was started there; name its --workdir, or train first: python run.py --config FILE"
        raise UserError(f"{file}: missing: {rule}") from error
    version = saved.pop("version", None)
    if type(version) is not int or version != VERSION:
        rule = f"this program reads a run's configuration of version {VERSION}; use the program that wrote it"
        raise UserError(f"{file}: version={version!r:.80}: {rule}")
    try:
        return build(saved)
    except ValueError as error:  # a UserError of build is a ValueError too
        raise UserError(f"{file}: {str(error).rstrip('.')}; {_RESTORE}") from error


def read_rows(path: Path, *, kind: Any = dict[str, Any], required: Any = None) -> list[dict[str, Any]]:
    """Returns the rows of a JSON lines file, see `read_lines`."""
    return [row for _, row in read_lines(path, kind=kind, required=required)]


def read_lines(path: Path, *, kind: Any, required: Any = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line of a JSON lines file as it is there, with its row.

    A line that is not of the `kind`, or lacks a field of `required` (a TypedDict), is skipped with a warning on
    standard error; a last line that a crash has cut is skipped silently. Raises UserError for a folder.
    """
    faults: list[str] = []
    if path.is_dir():
        raise UserError(f"{path}: a folder; {_RESTORE}")
    with path.open("rb") as file:  # text would be cut at U+2028, and one broken byte would end it
        for number, line in enumerate(file, 1):
            try:
                row = schema.decode(line, kind, where=f"{path}:{number}", remedy="the line is skipped")
                if required is not None:
                    schema.convert(row, required, where=f"{path}:{number}", remedy="the line is skipped")
            except UserError as error:
                faults += [str(error)] if line.endswith(b"\n") else []
            else:
                yield line, row
    for fault in faults[:_SHOWN]:
        _log.warning("%s", fault)
    if len(faults) > _SHOWN:
        _log.warning("%s: %d more lines are skipped", path, len(faults) - _SHOWN)


def read_typed_rows(path: Path, kind: Any, *, remedy: str) -> list[dict[str, Any]]:
    """Returns `read_rows` of a file; raises UserError for a row that is not of the `kind`."""
    rows = enumerate(read_rows(path), 1)
    return [schema.convert(row, kind, where=f"{path}: row {number}", remedy=remedy) for number, row in rows]


class _Logged(TypedDict):
    step: schema.Index


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_logged(path)]


def read_logged(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    return read_lines(path, kind=dict[_Name, _Value], required=_Logged)


_Figure = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]


class Device(TypedDict):
    """A row of devices.jsonl: means over `samples` samples."""

    device: Annotated[str, msgspec.Meta(max_length=10_000)]
    samples: schema.Size
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    time: NotRequired[_Figure]
    utilisation: NotRequired[_Figure]
    memory_bytes: NotRequired[_Figure]
    card_bytes: NotRequired[_Figure]
    celsius: NotRequired[_Figure]
    watts: NotRequired[_Figure]
    peak_bytes: NotRequired[_Figure]
    limit_bytes: NotRequired[_Figure]


def read_devices(workdir: Path) -> list[dict[str, Any]]:
    """Returns the rows of every process's devices*.jsonl; raises UserError for one that is no `Device`."""
    remedy, paths = "the file must be as training wrote it: restore it, or remove it", workdir.glob("devices*.jsonl")
    return [row for path in sorted(paths) for row in read_typed_rows(path, Device, remedy=remedy)]


def lock(workdir: Path, name: str = LOCK, *, flag: str = "--workdir") -> None:
    """Locks a run's folder, or that of its evaluation, for the lifetime of this process; a second call does nothing.

    The file `name` names the owner. The lock is flock's: that of a killed process is free, on whatever host.

    Raises:
      UserError: another process has it, or the file cannot be written.
    """
    path = workdir / name
    if path.absolute() in _locks:
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the folder must be writable: choose {flag}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        rule = f"two would overwrite each other: wait for it, stop it, or name another {flag}."
        raise UserError(f"{workdir}: another process is writing here: {_describe_owner(path)}; {rule}") from error
    except OSError as error:  # Lustre without its mount option "flock", NFS without a lock service
        consequence = "this file system has no locks: a second run in the folder would not be noticed"
        _log.warning("%s: %s; %s", path, error.strerror, consequence)
    user = os.environ.get("USER") or f"uid {os.getuid()}"
    owner = _Owner(user, socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
    try:
        os.ftruncate(file, 0)
        os.write(file, msgspec.json.encode(owner))
    except OSError as error:  # a full disk
        os.close(file)
        raise UserError(f"{path}: {error.strerror}; the folder must be writable: choose {flag}.") from error
    _locks[path.absolute()] = file


class _Owner(msgspec.Struct):
    user: str
    host: str
    process: int
    since: str


def _describe_owner(path: Path) -> str:
    try:
        owner = schema.read(path, _Owner, remedy="")
    except (UserError, FileNotFoundError):  # it is just being written
        return "its owner is not known"
    return f"{owner.user}, process {owner.process} on {owner.host}, since {owner.since}"


def check_writable(folder: Path, *, remedy: str) -> None:
    """Refuses an unwritable folder, existing or not, before any work is done."""
    existing = nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"{existing}: {error.strerror}; nothing can be written there: {remedy}.") from error


def load(workdir: str | Path | None, *, verb: str) -> ConfigDict:
    if verb == "train" or not workdir:
        where = "" if verb == "train" else " or --workdir DIR of a trained run"
        raise UserError(f"--config FILE{where} is needed; the quickest is --config configs/smoke.py.")
    return ConfigDict(dataclasses.asdict(read_config(Path(workdir))))


# Keys that may have other values where a wire folder is read: its models are known by their hashes, and it may be
# evaluated on other texts.
_OPEN = re.compile(
    r"(llms\.\w+|encoder)\.(source|sha256)"
    r"|data\.(train|validation|validation_limit|columns|context_tokens|overlong)"
)


def check_agreement(cfg: Config, workdir: Path) -> None:
    """Refuses a configuration that differs in meaning from the run in the folder; an empty folder agrees.

    A wire folder's models may come from other places.
    """
    exported = wire_folder.is_wire(workdir)
    if not exported and not (workdir / "config.json").exists():
        return
    there, here = meaning(read_config(workdir)), meaning(cfg)
    if exported:
        there, here = ({k: v for k, v in values.items() if not _OPEN.fullmatch(k)} for values in (there, here))
    changes = diff(there, here)
    if changes:
        more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
        rule = "it would be another run; keep these values or name another --workdir."
        raise UserError(f"{workdir}: the run there differs in {'; '.join(changes[:3])}{more}: {rule}")


def validation_examples(cfg: Config) -> int:
    """Returns the most examples of a data set that a validation takes; 0: all."""
    return cfg.data.validation_limit or cfg.eval.examples


def check_run(cfg: Config, workdir: Path) -> None:
    """Refuses a folder that holds another run, another wire's results, or a config.json that is not a run's.

    A run that was refused before its first row and checkpoint is no obstacle: the mended configuration replaces it.
    """
    whole = (path for path in (workdir / "checkpoints").glob("[0-9]*") if path.name.isdecimal())
    if (workdir / EVALUATION).exists() and not any(whole):
        rule = "results of weights that are not here, which would be taken for this run's"
        rule += ": name another --workdir, or remove them"
        raise UserError(f"{workdir / EVALUATION}: {rule}")
    saved = (workdir / "config.json").exists()
    if has_trained(workdir):
        check_agreement(cfg, workdir)
        before, now = (validation_examples(config) for config in (read_config(workdir) if saved else cfg, cfg))
        if now != before and cfg.train.steps:
            others = " (`eval` takes any)" if cfg.recipe == "latentwire" else ""
            raise UserError(
                f"{workdir}: config.eval.examples={before or 'all'} there, {now or 'all'} here: scores of its "
                f"checkpoints would be of other examples; keep it{others}, or name another --workdir"
            )
        return
    if saved:
        read_config(workdir)  # refuses a file that is not a run's, as a model's folder has, before it is replaced


def write_workdir(workdir: Path, *, cfg: Config, base: Mapping[str, Any], command: Sequence[str]) -> None:
    """Writes config.json, config.diff (against `base`), command.txt and versions.json.

    Raises UserError as `check_run`, and where the folder cannot be written.
    """
    check_run(cfg, workdir)
    versions = {"python": platform.python_version()} | {name: _find_version(name) for name in PACKAGES}
    texts = {
        "config.json": config_text(cfg),
        "config.diff": "\n".join(diff(base, to_dict(cfg))),
        "command.txt": shlex.join(command),
        "versions.json": json.dumps(versions, indent=2),
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(workdir / name, text + "\n")
    except OSError as error:
        raise UserError(f"{workdir}: {error.strerror}; the run's folder must be writable: choose --workdir.") from error


def config_text(cfg: Config) -> str:
    return json.dumps({"version": VERSION} | to_dict(cfg), indent=2)


def has_trained(workdir: Path) -> bool:
    """Returns whether a run's folder has a row or a checkpoint: before, its configuration may change."""
    metrics = workdir / "metrics.jsonl"
    return any((workdir / "checkpoints").glob("[0-9]*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _find_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
