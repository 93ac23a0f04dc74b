"""Training state on disk: asynchronous, atomic, checked by hash, readable on any mesh.

One folder per step. Orbax writes the arrays; `record.json`, written last inside the folder that a rename then commits,
holds everything else and the size and SHA-256 of every file. A folder without a fitting record is damage, never a
checkpoint. (Orbax 0.12.8 alone reads a flipped bit of an array without complaint.)
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from lw_jax.core import processes, tree
from lw_jax.core.errors import UserError
from lw_jax.core.files import nearest, whole
from lw_jax.core.types import Tree
from lw_jax.training import checkpoint_record, orbax_logs
from lw_jax.training.checkpoint_record import BEST, RECORD, Damage, is_gone

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder that orbax has not committed
REMOVED = ".removed"  # suffix of a checkpoint that is being removed
TRIES = 50  # of a reader, while a training run replaces the checkpoints that it lists and reads
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Restored:
    """Result of `Checkpointer.restore`."""

    step: int
    state: dict[str, Tree]
    data: dict[str, Any]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # empty: it was not validated
    identity: dict[str, str] = dataclasses.field(default_factory=dict)  # as it was saved


class Checkpointer:
    """Saves and restores a dict of pytrees by step, keeping the newest `keep` and the best by metrics["nll"].

    `identity` says what the state belongs to (encoder, config, fingerprints of frozen weights, hashes of the data): a
    folder that holds checkpoints of another identity is refused when opened. All processes must make the same calls.
    """

    def __init__(self, folder: Path, *, keep: int, identity: dict[str, str] | None) -> None:
        """Opens a folder; with None as identity it reads any checkpoint and cannot save."""
        self._folder, self._keep, self._identity = folder.absolute(), keep, identity
        self._damaged: dict[int, str] = {}  # step -> reason, as the last restoring found
        self._pending: tuple[int, int, dict[str, Any]] | None = None  # step, bytes, record without files
        self._saved: int | None = None
        if identity is not None:
            for step, record in sorted(_whole(self._read_records()).items()):
                checkpoint_record.check_identity(self._folder / str(step), record["identity"], identity)
        orbax_logs.install()
        # Hashing a large checkpoint may outlast orbax's 20 minutes; the death of a process is detected by the watch.
        patience = ocp.options.AsyncOptions(processes.PATIENCE, post_finalization_callback=self._write_record)
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, state: dict[str, Tree], *, data: dict[str, Any], wait: bool = False) -> None:
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
        record = {"version": checkpoint_record.VERSION, "step": step, "identity": self._identity, "data": data}
        record |= {"metrics": {}, "leaves": leaves}
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
        """Adds the validation score to the step last saved or restored here.

        The record is replaced as a whole: a kill leaves the checkpoint with its score or without.
        """
        self._finish()
        assert step == self._saved, f"{step} is not the newest checkpoint, {self._saved}"
        if jax.process_index() != 0:
            return
        path = self._folder / str(step) / RECORD
        record = checkpoint_record.read_record(path)
        if isinstance(record, UserError):
            raise record
        if isinstance(record, Damage):
            raise UserError(f"{path.parent}: its score cannot be added: {record.reason}; start the command again")
        try:
            with whole(path) as partial:
                checkpoint_record.write_record(partial, record | {"metrics": record["metrics"] | {BEST: nll}})
        except OSError as error:
            unchanged = "the checkpoint is as it was, start the command again"
            raise UserError(f"{path}: its score cannot be added: {error.strerror}; {unchanged}") from error
        self._remove_old()

    def restore(self, abstract_state: dict[str, Tree], *, best: bool = False) -> Restored | None:
        """Returns the newest undamaged checkpoint on the shardings of `abstract_state`, or None if none is.

        `best`: the one with the best score, the newest where none has any. Process 0 chooses for all. Where a training
        run removes the chosen one meanwhile, another is chosen.
        Leaves are ShapeDtypeStructs or arrays; one without a sharding goes to the first device. Some of the saved
        top-level keys may be restored alone. Raises UserError when all checkpoints are damaged, when one cannot be
        read, and when paths, shapes or dtypes differ from the saved ones.
        """
        self._finish()
        for _ in range(TRIES):
            chosen = processes.from_first(lambda: self._choose(best=best))
            if chosen is None:
                return None
            if not chosen:
                continue
            step = chosen["step"]
            folder = self._folder / str(step)
            checkpoint_record.check_leaves(folder, chosen["leaves"], abstract_state)
            with _Reading(folder):
                state = self._read(step, abstract_state)
                self._saved = step
                return Restored(step, state, **{key: chosen[key] for key in ("data", "metrics", "identity")})
        raise UserError(
            f"{self._folder}: each of {TRIES} checkpoints was replaced while it was read; read when the run has "
            "ended, or train with a larger train.checkpoint_every"
        )

    def _choose(self, *, best: bool) -> dict[str, Any] | None:
        """Returns step, data, leaves and metrics of the checkpoint to restore; None: none is; tells of damaged ones.

        Empty where training has replaced a checkpoint since they were listed.
        """
        entries = self._read_records()
        if any(is_gone(self._folder / str(step)) for step in entries.keys() - _whole(entries)):
            return {}
        for unread in entries.values():
            if isinstance(unread, UserError):
                raise unread
        records = _whole(entries)
        self._damaged = {step: damage.reason for step, damage in entries.items() if isinstance(damage, Damage)}
        for step in _rank(records, best=best):
            folder = self._folder / str(step)
            damage = checkpoint_record.find_damage(folder, records[step]["files"])
            if not damage:
                if self._damaged:
                    _log.warning("%s: %s; took %d", self._folder, self._describe_damage(), step)
                return {key: records[step][key] for key in ("leaves", "data", "metrics", "identity")} | {"step": step}
            if is_gone(folder):
                return {}
            self._damaged[step] = damage
        if self._damaged:
            raise UserError(
                f"{self._folder}: no usable checkpoint, {self._describe_damage()}; none is left; bring one back from a "
                "copy, or start anew with another --workdir"
            )
        return None

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
        assert self._pending is not None
        (step, size, _), self._pending = self._pending, None
        self._drain()
        self._remove_unfinished()
        if any(os.strerror(code) in str(error) for code in FULL):
            free = shutil.disk_usage(nearest(self._folder)).free
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

    def _drain(self) -> None:
        """Waits for the other files of a failed write; each of their errors, which say the same, is raised once."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                return self._orbax.wait_until_finished()

    def _write_record(self) -> None:
        """Writes the record, in orbax's thread of process 0, between the arrays and the rename that commits."""
        assert self._pending is not None, "orbax commits what was saved"
        step, _, record = self._pending
        folder = next(path for path in self._list() if path.name.startswith(f"{step}{UNFINISHED}"))
        checkpoint_record.write_record(folder / RECORD, record | {"files": checkpoint_record.measure_files(folder)})

    def _read_records(self) -> dict[int, dict[str, Any] | Damage | UserError]:
        """Returns step -> record, its damage, or the refusal of what cannot be read, of every checkpoint."""
        return {int(path.name): checkpoint_record.read_record(path / RECORD) for path in self._list_steps()}

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

    def _check_order(self, step: int) -> None:
        """Refuses a step before the newest; runs in process 0, which alone knows the damaged checkpoints."""
        present = {step for step, record in self._read_records().items() if not isinstance(record, Damage)}
        newest = max(present - self._damaged.keys(), default=-1)
        if newest >= step:
            raise UserError(
                f"{self._folder}: it holds checkpoint {newest}, step {step} would come before or over it; continue "
                "from the latest, or give another --workdir"
            )

    def _describe_damage(self) -> str:
        return "; ".join(f"checkpoint {step} is damaged ({why})" for step, why in sorted(self._damaged.items()))

    def _remove_old(self) -> None:
        """Removes damaged checkpoints and all but the newest and the best; none that could not be read."""
        entries = self._read_records()
        unread = {step for step, record in entries.items() if isinstance(record, UserError)}
        records = {step: record for step, record in _whole(entries).items() if step not in self._damaged}
        best = _rank(records, best=True)[:1]
        preserved = unread.union(sorted(records)[-self._keep :], best)
        self._remove(self._folder / str(step) for step in entries if step not in preserved)
        self._damaged = {}

    def _remove_unfinished(self) -> None:
        if jax.process_index() == 0:
            unfinished = re.compile(rf"\d+({re.escape(UNFINISHED)}.*|{re.escape(REMOVED)})")
            self._remove(path for path in self._list() if unfinished.fullmatch(path.name))

    def _remove(self, paths: Iterable[Path]) -> None:
        """Removes folders, renamed first: a reader finds a whole checkpoint or none."""
        for path in paths:
            try:
                if path.suffix != REMOVED:
                    path = path.rename(path.with_name(path.name + REMOVED))
                shutil.rmtree(path)
            except OSError as error:
                if path.suffix == REMOVED and error.errno in (errno.ENOTEMPTY, errno.EBUSY):
                    # NFS keeps the files that a reader on this node has open.
                    _log.warning("%s: it is still read (%s); it is removed at a later checkpoint", path, error)
                    continue
                raise UserError(f"{path}: an old checkpoint cannot be removed: {error}; remove it by hand") from error

    def _list_steps(self) -> list[Path]:
        for _ in range(TRIES):
            if folders := [path for path in self._list() if re.fullmatch("[0-9]+", path.name)]:
                return folders
        return []

    def _list(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.is_dir()) if self._folder.is_dir() else []


class _Reading(contextlib.AbstractContextManager[Any]):
    """Context of reading a checkpoint, whose errors end it silently where training has removed the folder.

    Orbax raises ValueError, OSError or a bare Exception then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: types.TracebackType | None):
        alone = jax.process_count() == 1  # several processes train, and only process 0 removes
        return isinstance(error, Exception) and alone and not self._folder.is_dir()


def _whole(entries: dict[int, dict[str, Any] | Damage | UserError]) -> dict[int, dict[str, Any]]:
    return {step: record for step, record in entries.items() if isinstance(record, dict)}


def _rank(records: dict[int, dict[str, Any]], *, best: bool) -> list[int]:
    """Returns the steps in the order in which they are restored: the newest first, or by score before those without."""
    scored = checkpoint_record.scores(records) if best else {}
    return sorted(scored, key=lambda step: (scored[step], -step)) + sorted(records.keys() - scored, reverse=True)


def newest_step(workdir: Path) -> int:
    """Returns the step of a run's newest checkpoint, 0 where there is none; nothing of it is read."""
    records = (workdir / "checkpoints").glob(f"*/{RECORD}")
    return max((int(path.parent.name) for path in records if path.parent.name.isdecimal()), default=0)


def read_best(workdir: Path, trainable: Tree, *, identity: dict[str, Any] | None) -> Restored:
    """Returns the trainable parameters of a run's best checkpoint (the latest where none was validated).

    Args:
        trainable: shapes with shardings.
        identity: what the checkpoint must agree with; None: nothing.

    Raises:
      UserError: there is no checkpoint yet, or as `Checkpointer.restore`.
    """
    with Checkpointer(workdir / "checkpoints", keep=1, identity=identity) as checkpointer:
        restored = checkpointer.restore({"trainable": trainable}, best=True)
    if restored is None:
        raise UserError(f"{workdir}: no checkpoint yet; train first: python run.py --config FILE --workdir {workdir}")
    return restored
