"""Training state on disk: asynchronous, atomic, checked by hash, readable on any mesh.

One folder per step. Orbax writes the arrays; `record.json`, written last inside the folder that a rename then commits,
holds everything else and the size and SHA-256 of every file. A folder without a fitting record is damage, never a
checkpoint. (Orbax 0.12.8 alone reads a flipped bit of an array without complaint.)
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import traceback
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict

import jax
import msgspec
import orbax.checkpoint as ocp

from lw_jax.core import processes, schema, tree
from lw_jax.core.errors import UserError
from lw_jax.core.files import whole
from lw_jax.core.types import Tree

RECORD = "record.json"
TIMES = "_CHECKPOINT_METADATA"  # orbax adds the time of the commit to it afterwards; reading needs nothing of it
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder that orbax has not committed
REMOVED = ".removed"  # ends the name of a checkpoint that is just being removed
TRIES = 50  # of a reader whose checkpoints a training run replaces while it reads them
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONTENT = ("train", "validation")  # of an identity, hashes of data: who resumes has them, who reads need not
BEST = "nll"  # the metric by which a checkpoint is the best; lower is better


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` found; `note` names damaged checkpoints that were passed over (else empty)."""

    step: int
    state: dict[str, Tree]
    data: dict[str, Any]
    note: str
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # empty: it was not validated


_Size = Annotated[int, msgspec.Meta(ge=0)]
_File = Annotated[str, msgspec.Meta(pattern=r"^[^\x00\ud800-\udfff]+$")]  # what a file system can be asked for


class _Record(TypedDict):
    """What record.json holds beside its hash."""

    step: _Size
    identity: dict[str, str]
    data: dict[str, Any]
    metrics: dict[str, float | None]
    leaves: dict[str, tuple[list[_Size], str]]  # shape and dtype
    files: dict[_File, tuple[_Size, str]]  # bytes and SHA-256


@dataclasses.dataclass(frozen=True)
class _Damage:
    reason: str


class _Gone(Exception):
    """A checkpoint was removed while it was read."""


class Checkpointer:
    """Saves and restores a dict of pytrees by step, keeping the newest `keep` and the best by metrics["nll"].

    `identity` says what the state belongs to (encoder, config, fingerprints of frozen weights, hashes of the data): a
    folder that holds checkpoints of another identity is refused when opened. All processes must make the same calls.
    """

    def __init__(self, folder: Path | str, *, keep: int, identity: dict[str, str] | None) -> None:
        """None as identity reads whatever is there, and can save nothing."""
        if keep < 1:
            raise UserError(f"keep={keep}: must be at least 1")
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._identity = identity
        self._damaged: dict[int, str] = {}
        self._pending: tuple[int, int, dict[str, Any]] | None = None  # step, bytes, record without files
        self._saved: int | None = None
        self._unknown: list[str] = []  # data whose content the newest checkpoint does not record
        if identity is not None:
            for step, record in sorted(self._read_records().items()):
                self._check_identity(step, record["identity"], identity)
            self._tell_unknown_content()
        logging.getLogger("absl").addFilter(_is_told_only_there)
        _quiet_late_arrays()
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(),
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._write_record),
        )

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def save(
        self,
        step: int,
        state: dict[str, Tree],
        *,
        data: dict[str, Any],
        metrics: dict[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Starts writing the state and returns once it may be changed or donated; `wait` returns when it is on disk.

        The step last saved or restored here is left as it is. Raises UserError when the folder holds this step or a
        later one from another run, and when this or the previous write does not fit on the disk.
        """
        assert self._identity is not None, "opened for reading"
        self._finish()
        if step == self._saved:
            return
        processes.from_first(lambda: self._check_order(step))
        leaves = {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in tree.flatten_paths(state).items()}
        record = {"step": step, "identity": self._identity, "data": data, "metrics": metrics or {}, "leaves": leaves}
        self._pending = (step, tree.nbytes(state), json.loads(json.dumps(record)))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            self._orbax.save(self._folder / str(step), args=ocp.args.PyTreeSave(state), force=True)
        except (OSError, ValueError) as error:
            self._fail(error)
        if wait:
            self._finish()

    def add_score(self, step: int, nll: float) -> None:
        """Gives the step last saved or restored here its score, by which it can be the best.

        The record is replaced as a whole: a kill leaves the checkpoint with its score or without.
        """
        self._finish()
        assert step == self._saved, f"{step} is not the newest checkpoint, {self._saved}"
        if jax.process_index() != 0:
            return
        path = self._folder / str(step) / RECORD
        record = _read_record(path)
        if isinstance(record, _Damage):
            raise UserError(f"{path.parent}: its score cannot be added: {record.reason}; start the command again")
        try:
            with whole(path) as partial:
                _write_record(partial, record | {"metrics": record["metrics"] | {BEST: nll}})
        except OSError as error:
            raise UserError(f"{path}: its score cannot be added: {error.strerror}; the checkpoint is whole") from error
        self._remove_old()

    def restore(
        self, abstract_state: dict[str, Tree], *, which: Literal["latest", "best", "best or latest"] = "latest"
    ) -> Restored | None:
        """Returns the newest (or best) undamaged checkpoint on the shardings of `abstract_state`, or None if none is.

        Of several processes the first one chooses for all. What a training run removes meanwhile is chosen again.
        Leaves are ShapeDtypeStructs or arrays; one without a sharding comes to the first device. Some of the saved
        top-level keys may be asked for alone. Raises UserError when all checkpoints are damaged, when none has the
        metric of "best", and when paths, shapes or dtypes differ from the saved ones.
        """
        self._finish()
        for _ in range(TRIES):
            chosen = processes.from_first(lambda: self._choose(which))
            if chosen is None:
                return None
            step = chosen["step"]
            self._check_leaves(step, chosen["leaves"], abstract_state)
            with _Presence(self._folder / str(step)) as presence:
                state = self._read(step, abstract_state)
            if not presence.lost:
                self._saved = step
                return Restored(step, state, chosen["data"], chosen["note"], chosen["metrics"])
        raise self._too_fast()

    def _choose(self, which: str) -> dict[str, Any] | None:
        """Returns step, data, leaves and metrics of the checkpoint to restore, and a note of damage; None: none is."""
        for _ in range(TRIES):
            self._damaged = {}
            try:
                records = self._list_records()
                for step in self._rank(records, which):
                    folder = self._folder / str(step)
                    damage = _damaged_files(folder, records[step]["files"])
                    if not damage:
                        note = self._tell_damage(f"took {step}")
                        kept = {key: records[step][key] for key in ("leaves", "data", "metrics")}
                        return kept | {"step": step, "note": note}
                    if not folder.is_dir():
                        raise _Gone
                    self._damaged[step] = damage
            except _Gone:
                continue
            if self._damaged:
                raise UserError(
                    f"{self._folder}: no usable checkpoint, {self._tell_damage('none is left')}; bring one back from a "
                    "copy, or start anew with another --workdir"
                )
            return None
        raise self._too_fast()

    def _too_fast(self) -> UserError:
        return UserError(
            f"{self._folder}: each of {TRIES} checkpoints was replaced while it was read; read when the run has "
            "ended, or train with a larger train.checkpoint_every"
        )

    def steps(self) -> list[int]:
        """Returns the committed steps whose record is whole, ascending (array files are checked when restored)."""
        return sorted(self._read_records())

    def latest_step(self) -> int | None:
        """Returns the newest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def close(self) -> None:
        """Waits for the write under way and raises UserError if it failed."""
        try:
            self._finish()
        finally:
            self._orbax.close()

    def _finish(self) -> None:
        if self._pending is None:
            return
        try:
            self._orbax.wait_until_finished()
        except (OSError, ValueError) as error:
            self._fail(error)
        self._saved = self._pending[0]
        self._pending = None
        self._damaged.pop(self._saved, None)
        if jax.process_index() == 0:
            self._remove_old()

    def _fail(self, error: OSError | ValueError) -> None:
        """Translates a failed write, after removing what it left; earlier checkpoints are untouched."""
        if self._pending is None:
            raise error
        (step, size, _), self._pending = self._pending, None
        self._remove_unfinished()
        if any(os.strerror(code) in str(error) for code in FULL):
            free = shutil.disk_usage(self._folder).free
            raise UserError(
                f"{self._folder}: checkpoint {step} does not fit: it needs up to {size} bytes, {free} are free (or a "
                "quota is reached); free space, then start the same command again: earlier "
                "checkpoints are whole"
            ) from error
        if isinstance(error, OSError):
            raise UserError(
                f"{self._folder}: checkpoint {step} cannot be written: {error}; give a --workdir that can"
            ) from error
        raise error

    def _write_record(self) -> None:
        """Runs in orbax's thread on process 0, after the arrays are written and before the rename that commits."""
        if self._pending is None:
            raise RuntimeError("a checkpoint was committed that nobody asked for")
        step, _, record = self._pending
        unfinished = [path for path in self._list() if path.name.startswith(f"{step}{UNFINISHED}")]
        folder = unfinished[0] if unfinished else self._folder / str(step)
        written = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != TIMES)
        body = record | {"files": {str(path.relative_to(folder)): _measure(path) for path in written}}
        _write_record(folder / RECORD, body)

    def _read_records(self) -> dict[int, dict[str, Any]]:
        """Returns step -> record of every whole record, and notes the others as damaged."""
        for _ in range(TRIES):
            with contextlib.suppress(_Gone):
                return self._list_records()
        raise self._too_fast()

    def _list_records(self) -> dict[int, dict[str, Any]]:
        """Returns the same; raises _Gone where one was removed meanwhile, so that the list is not what is there."""
        records = {}
        for path in self._list():
            if not _is_step(path):
                continue
            record = _read_record(path / RECORD)
            if isinstance(record, _Damage):
                if not path.is_dir():
                    raise _Gone
                self._damaged[int(path.name)] = record.reason
            else:
                records[int(path.name)] = record
        return records

    def _rank(self, records: dict[int, dict[str, Any]], which: str) -> list[int]:
        if which not in ("latest", "best", "best or latest"):
            raise UserError(f"checkpoint {which!r} is not one of latest, best, best or latest")
        scored = _scores(records)
        if which == "latest" or (which == "best or latest" and not scored):
            return sorted(records, reverse=True)
        if records and not scored:
            raise UserError(
                f"{self._folder}: none of the checkpoints {sorted(records)} has the metric {BEST!r}; take the latest, "
                "or train with train.eval_every > 0"
            )
        return sorted(scored, key=lambda step: (scored[step], -step))

    def _read(self, step: int, abstract_state: dict[str, Tree]) -> dict[str, Tree]:
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or first),
            abstract_state,
        )
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        return self._orbax.restore(
            self._folder / str(step), args=ocp.args.PyTreeRestore(target, arguments, partial_restore=True)
        )

    def _check_identity(self, step: int, saved: dict[str, str], own: dict[str, str]) -> None:
        content = own.keys() & saved.keys() & set(CONTENT)
        self._unknown = sorted(own.keys() & set(CONTENT) - content)  # of the newest, the last one asked about
        for key in sorted((saved.keys() | own.keys()) - set(CONTENT) | content):
            there, here = saved.get(key, "(absent)"), own.get(key, "(absent)")
            if there != here:
                raise UserError(
                    f"{self._folder}: checkpoint {step} was made with {key}={there}, this run has {key}={here}; give "
                    "another --workdir, or go back to what made it"
                )

    def _tell_unknown_content(self) -> None:
        """Warns where the newest checkpoint was saved before its record knew the content of the data."""
        if self._unknown and jax.process_index() == 0:
            print(
                f"{self._folder}: the checkpoints do not record the content of {', '.join(self._unknown)} data, as "
                "earlier versions saved them: that it is unchanged is not checked",
                file=sys.stderr,
            )

    def _check_order(self, step: int) -> None:
        """Refuses to write the past; runs in the first process, which alone knows which checkpoints are damaged."""
        newest = max(self._read_records().keys() - self._damaged.keys(), default=-1)
        if newest >= step:
            raise UserError(
                f"{self._folder}: it holds checkpoint {newest}, which saving step {step} would make the past; continue "
                "from the latest, or give another --workdir"
            )

    def _check_leaves(self, step: int, saved: dict[str, list[Any]], abstract_state: dict[str, Tree]) -> None:
        asked = {path: [list(x.shape), str(x.dtype)] for path, x in tree.flatten_paths(abstract_state).items()}
        saved = {path: leaf for path, leaf in saved.items() if path.split("/")[0] in abstract_state}
        for path in sorted(saved.keys() | asked.keys()):
            if saved.get(path) != asked.get(path):
                there, here = (_say_leaf(leaves.get(path)) for leaves in (saved, asked))
                raise UserError(
                    f"{self._folder}: checkpoint {step} holds {path} {there}, this run wants {here}; give another "
                    "--workdir, or the config that made it"
                )

    def _tell_damage(self, outcome: str) -> str:
        if not self._damaged:
            return ""
        named = "; ".join(f"checkpoint {step} is damaged ({why})" for step, why in sorted(self._damaged.items()))
        note = f"{named}; {outcome}"
        print(f"{self._folder}: {note}", file=sys.stderr)
        return note

    def _remove_old(self) -> None:
        """Removes what is neither kept nor best: older steps and damaged ones."""
        records = {step: record for step, record in self._read_records().items() if step not in self._damaged}
        kept = set(sorted(records)[-self._keep :])
        scored = _scores(records)
        if scored:
            kept.add(min(scored, key=lambda step: (scored[step], -step)))
        self._remove(path for path in self._list() if _is_step(path) and int(path.name) not in kept)
        self._damaged = {}

    def _remove_unfinished(self) -> None:
        """Removes what a killed or failed write or removal left."""
        if jax.process_index() == 0:
            unfinished = re.compile(rf"\d+({re.escape(UNFINISHED)}.*|{re.escape(REMOVED)})")
            self._remove(path for path in self._list() if unfinished.fullmatch(path.name))

    def _remove(self, paths: Iterable[Path]) -> None:
        """Removes folders; first from their names, so that a reader finds a whole checkpoint or none."""
        for path in paths:
            try:
                if path.suffix != REMOVED:
                    path = path.rename(path.with_name(path.name + REMOVED))
                shutil.rmtree(path)
            except OSError as error:
                raise UserError(f"{path}: an old checkpoint cannot be removed: {error}; remove it by hand") from error

    def _list(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.is_dir()) if self._folder.is_dir() else []


class _Presence:
    """Guards the reading of a checkpoint's folder: an error is `lost`, not raised, where the folder has gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lost = False

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: types.TracebackType | None):
        """Suppresses an error where the folder has gone; orbax raises ValueError, OSError or a bare Exception then."""
        alone = jax.process_count() == 1  # several are training, and nobody else removes what they restore
        self.lost = isinstance(error, Exception) and alone and not self._folder.is_dir()
        return self.lost


def _is_told_only_there(entry: logging.LogRecord) -> bool:
    """Drops orbax's tracebacks of a failed write: the same errors come back here and become one message."""
    return not (entry.exc_info and "orbax" in entry.pathname)


@functools.cache
def _quiet_late_arrays() -> None:
    """Drops what is printed of the arrays that were still under way when the first one failed, which is raised.

    In writing, as on a full disk, their futures report to an event loop that orbax has closed by then: dozens of
    tracebacks without the cause. In reading, orbax turns the end of their coroutines into errors that nobody awaits.
    """
    before = sys.unraisablehook

    def tell(told: "sys.UnraisableHookArgs") -> None:
        frames = [frame for frame, _ in traceback.walk_tb(told.exc_traceback)]
        within = frames[-1].f_globals.get("__name__", "") if frames else ""
        closed = str(told.exc_value) == "Event loop is closed" and within.startswith("asyncio.")
        ended = isinstance(getattr(told.exc_value, "__cause__", None), GeneratorExit) and within.startswith("orbax.")
        if not closed and not ended:
            before(told)

    sys.unraisablehook = tell


def _scores(records: dict[int, dict[str, Any]]) -> dict[int, float]:
    found = {step: record["metrics"].get(BEST) for step, record in records.items()}
    return {step: value for step, value in found.items() if value is not None and math.isfinite(value)}


def _say_leaf(leaf: list[Any] | None) -> str:
    return "(absent)" if leaf is None else f"{tuple(leaf[0])} {leaf[1]}"


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _write_record(path: Path, record: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump({"sha256": _digest(record), "record": record}, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _measure(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _is_step(path: Path) -> bool:
    return re.fullmatch("[0-9]+", path.name) is not None


def _read_record(path: Path) -> dict[str, Any] | _Damage:
    """Returns the record of record.json, of the types that `_Record` names."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return _Damage(f"{path.name} is missing")
    except OSError as error:
        return _Damage(f"{path.name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deeply
        return _Damage(f"{path.name} is broken: {error}")
    if not isinstance(content, dict) or content.get("sha256") != _digest(content.get("record", {})):
        return _Damage(f"{path.name} does not fit its own hash")
    try:
        schema.convert(content.get("record"), _Record, where=path.name, remedy="it is no record of a checkpoint")
    except UserError as error:
        return _Damage(str(error))
    return content["record"]


def _damaged_files(folder: Path, files: dict[str, list[Any]]) -> str:
    """Returns what is wrong with the files that a record lists, or an empty string."""
    for name, (size, sha256) in files.items():
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} of {size} bytes"
            if _measure(folder / name)[1] != sha256:
                return f"{name} is not what was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def read_best(workdir: Path, trainable: Tree, *, identity: dict[str, Any] | None) -> Restored:
    """Returns what a run has learned, from its best checkpoint (the latest where none was validated).

    Args:
        trainable: shapes with shardings.
        identity: what the checkpoint must agree with; None: nothing.

    Raises:
      UserError: there is no checkpoint yet, or as `Checkpointer.restore`.
    """
    with Checkpointer(workdir / "checkpoints", keep=1, identity=identity) as checkpointer:
        restored = checkpointer.restore({"trainable": trainable}, which="best or latest")
    if restored is None:
        raise UserError(f"{workdir}: no checkpoint yet; train first: python run.py --config FILE --workdir {workdir}")
    return restored
