"""Checkpoints: exact, atomic, elastic, and damage is detected."""

import errno
import functools
import json
import os
import re
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from lw_jax.core import processes
from lw_jax.core.errors import UserError
from lw_jax.training import checkpoint, checkpoint_record
from lw_jax.training.checkpoint import RECORD, Checkpointer
from sharding import mesh as meshes
from tests import tiny

IDENTITY = {"config": "a1", "frozen/llama": "b2"}


@functools.cache
def make_state(devices: int = 1, *, value: float = 1.0) -> dict:
    """Trainables of three dtypes, optimizer state and a count; one weight split over `devices`."""
    mesh = meshes.make(data=devices, devices=jax.devices()[:devices])
    values = np.random.default_rng(7).normal(size=(16, 3)).astype(np.float32) * value
    trainable = {"encoder": {"kernel": values, "gain": values[0].astype(ml_dtypes.bfloat16)}, "adapter": [values[:5]]}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {"trainable": trainable, "opt_state": tx.init(trainable), "step": np.int32(11)}

    def put(leaf):
        spec = P("data") if np.shape(leaf) == (16, 3) else P()
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

    return jax.tree.map(put, state)


def abstract(state: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same_bits(one: dict, other: dict) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def reopen(folder: Path, *, keep: int = 3, identity=None) -> Checkpointer:
    return Checkpointer(folder, keep=keep, identity=identity or IDENTITY)


def fill(folder: Path, scores: dict[int, float | None], *, keep: int = 3) -> Path:
    """Saves so many steps, those with a score validated."""
    with reopen(folder, keep=keep) as checkpointer:
        for step, score in scores.items():
            checkpointer.save(step, make_state(value=step), data={"next_index": 10 * step})
            if score is not None:
                checkpointer.add_score(step, score)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("written"), {3: None, 5: None})


@pytest.fixture
def two(written, tmp_path) -> Path:
    """A folder with checkpoints 3 and 5."""
    return shutil.copytree(written, tmp_path / "two")


def restore(folder: Path, *, best: bool = False, target: dict | None = None) -> checkpoint.Restored:
    with reopen(folder) as checkpointer:
        found = checkpointer.restore(abstract(make_state()) if target is None else target, best=best)
    assert found is not None
    return found


def test_empty_or_absent_folder_restores_nothing(tmp_path):
    with reopen(tmp_path / "absent") as checkpointer:
        assert checkpointer.restore(abstract(make_state())) is None
    assert not (tmp_path / "absent").exists()


def test_state_written_on_eight_devices_restores_bit_for_bit_on_two(tmp_path):
    written = make_state(8)
    with reopen(tmp_path) as checkpointer:
        checkpointer.save(7, written, data={"next_index": 42})
    target = make_state(2, value=0.0)
    restored = restore(tmp_path, target=abstract(target))
    assert (restored.step, restored.data) == (7, {"next_index": 42})
    assert_same_bits(restored.state, written)
    for leaf, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_buffers_donated_right_after_save_do_not_change_what_is_written(tmp_path):
    values = jnp.arange(1_000_003, dtype=jnp.float32)
    expected = np.asarray(values).copy()
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with reopen(tmp_path) as checkpointer:
        checkpointer.save(1, {"trainable": {"w": values}}, data={})
        step(values).block_until_ready()
    target = {"trainable": {"w": jax.ShapeDtypeStruct(expected.shape, expected.dtype)}}
    np.testing.assert_array_equal(restore(tmp_path, target=target).state["trainable"]["w"], expected)


def test_saving_the_last_step_again_leaves_it_alone(tmp_path):
    with reopen(tmp_path) as checkpointer:
        checkpointer.save(3, make_state(value=1), data={}, wait=True)
        before = (tmp_path / "3" / RECORD).stat()
        checkpointer.save(3, make_state(value=2), data={}, wait=True)
    after = (tmp_path / "3" / RECORD).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_run_that_forgot_to_restore_overwrites_nothing(two):
    before = tiny.contents(two)
    with reopen(two) as checkpointer:
        for step in (4, 5):
            with pytest.raises(UserError, match=f"checkpoint 5.*step {step}"):
                checkpointer.save(step, make_state(), data={})
    assert tiny.contents(two) == before


def chunk(folder: Path) -> Path:
    return max((folder / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGE = {
    "array chunk truncated": (chunk, truncate, "ocdbt.process_0"),
    "array chunk missing": (chunk, Path.unlink, "ocdbt.process_0"),
    "one bit of an array flipped": (chunk, flip, "ocdbt.process_0"),
    "array index missing": (lambda folder: folder / "manifest.ocdbt", Path.unlink, "manifest.ocdbt"),
    "tree metadata truncated": (lambda folder: folder / "_METADATA", truncate, "_METADATA"),
    "record missing": (lambda folder: folder / RECORD, Path.unlink, "record.json"),
    "record truncated": (lambda folder: folder / RECORD, truncate, "record.json"),
    "record edited": (lambda folder: folder / RECORD, flip, "record.json"),
    "record a folder": (lambda folder: folder / RECORD, lambda path: path.unlink() or path.mkdir(), "record.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_is_named_and_the_previous_one_taken(two, caplog, kind):
    find, damage, named = DAMAGE[kind]
    damage(find(two / "5"))
    with reopen(two) as checkpointer:
        restored = checkpointer.restore(abstract(make_state()))
        assert (restored.step, restored.data) == (3, {"next_index": 30})
        assert_same_bits(restored.state, make_state(value=3))
        assert re.search(rf"checkpoint 5 .*{named}.*took 3", caplog.text)
        # The run goes on to the damaged step, which is then written anew.
        checkpointer.save(5, make_state(value=50), data={"next_index": 500})
    restored = restore(two)
    assert (restored.step, restored.data) == (5, {"next_index": 500})


def fail_at(patch: pytest.MonkeyPatch, file: Path, code: int) -> None:
    """Lets every opening of a file fail, as a network's file system does for a while."""

    def refused(real):
        def call(path, *args, **kwargs):
            if path == file:
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *args, **kwargs)

        return call

    patch.setattr(Path, "open", refused(Path.open))
    patch.setattr(Path, "read_bytes", refused(Path.read_bytes))


def test_best_checkpoint_that_cannot_be_read_for_a_while_outlives_later_saves(tmp_path, monkeypatch):
    fill(tmp_path, {2: 1.0, 3: 4.0}, keep=1)
    with reopen(tmp_path, keep=1) as checkpointer:
        with monkeypatch.context() as patch:
            fail_at(patch, tmp_path / "2" / RECORD, errno.ESTALE)
            checkpointer.save(4, make_state(value=4), data={}, wait=True)
            checkpointer.add_score(4, 3.0)
        checkpointer.save(5, make_state(value=5), data={}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "5"]
    assert restore(tmp_path, best=True).step == 2


@pytest.mark.parametrize("find", [lambda folder: folder / RECORD, chunk])
def test_checkpoint_that_cannot_be_read_is_refused_and_no_older_one_taken(two, monkeypatch, find):
    file = find(two / "5")
    with reopen(two) as checkpointer:
        with monkeypatch.context() as patch:
            fail_at(patch, file, errno.ESTALE)
            with pytest.raises(UserError, match=re.escape(str(file))):
                checkpointer.restore(abstract(make_state()))
            with pytest.raises(UserError, match="checkpoint 5"):
                checkpointer.save(5, make_state(), data={})
        restored = checkpointer.restore(abstract(make_state()))
    assert restored.step == 5


def test_partial_write_is_never_a_checkpoint_and_goes_with_the_next_save(two):
    partial = two / "6.orbax-checkpoint-tmp"
    for folder in (partial, two / "notes", two / "\u00b2"):  # a digit, not a number
        folder.mkdir()
    with reopen(two) as checkpointer:
        assert checkpointer.restore(abstract(make_state())).step == 5
        assert partial.exists()  # reading removes nothing
        checkpointer.save(7, make_state(), data={})
    assert sorted(path.name for path in two.iterdir()) == ["3", "5", "7", "notes", "\u00b2"]


def test_old_checkpoint_that_a_reader_holds_open_on_nfs_goes_with_a_later_save(two, monkeypatch, caplog):
    def held(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with reopen(two, keep=1) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", held)
            checkpointer.save(7, make_state(), data={}, wait=True)
        assert sorted(path.name for path in two.iterdir()) == ["3.removed", "5.removed", "7"]
        assert f"{two / '3.removed'}: " in caplog.text
        checkpointer.save(8, make_state(), data={}, wait=True)
    assert [path.name for path in two.iterdir()] == ["8"]


def test_other_identity_is_refused_with_key_and_values(written):
    for identity, words in (
        (IDENTITY | {"config": "zz"}, "config=a1.*config=zz"),
        ({"config": "a1"}, r"frozen/llama=b2.*frozen/llama=\(absent\)"),
        (IDENTITY | {"encoder": "c3"}, r"encoder=\(absent\).*encoder=c3"),
    ):
        with pytest.raises(UserError, match=f"{written}.*{words}"):
            reopen(written, identity=identity)


def test_other_shape_dtype_or_path_is_refused_and_not_taken_for_damage(written):
    target = abstract(make_state())
    kernel = target["trainable"]["encoder"]["kernel"]
    others = [
        ({"kernel": jax.ShapeDtypeStruct((16, 5), kernel.dtype)}, r"\(16, 3\) float32.*\(16, 5\) float32"),
        ({"kernel": jax.ShapeDtypeStruct((16, 3), jnp.bfloat16)}, r"\(16, 3\) float32.*\(16, 3\) bfloat16"),
        ({"extra": kernel}, r"encoder/extra \(absent\)"),
    ]
    for change, words in others:
        encoder = target["trainable"]["encoder"] | change
        with pytest.raises(UserError, match=words):
            restore(written, target=target | {"trainable": target["trainable"] | {"encoder": encoder}})


def replace_newest(folder: Path) -> None:
    """Does to a checkpoint what a training run with keep=1 does while another process reads it."""
    newest = max(int(path.name) for path in folder.iterdir())
    with reopen(folder, keep=1) as checkpointer:
        checkpointer.restore(abstract(make_state()))
        checkpointer.save(newest + 1, make_state(value=newest + 1), data={})
        checkpointer.add_score(newest + 1, 1 / newest)


@pytest.mark.parametrize("moment", ["read_record", "find_damage", "_read"])
def test_reader_takes_the_next_checkpoint_where_training_removes_the_one_it_reads(
    tmp_path, monkeypatch, caplog, moment
):
    fill(tmp_path / "checkpoints", {1: None}, keep=1)
    owner = checkpoint.Checkpointer if moment == "_read" else checkpoint_record
    original, calls = getattr(owner, moment), []

    def after_replacement(*args):
        calls.append(1)
        if len(calls) == 1:  # before this one reads anything; the replacement makes such calls of its own
            replace_newest(tmp_path / "checkpoints")
        return original(*args)

    monkeypatch.setattr(owner, moment, after_replacement)
    restored = checkpoint.read_best(tmp_path, abstract(make_state())["trainable"], identity=None)
    assert restored.step == 2 and "damaged" not in caplog.text
    assert_same_bits(restored.state, {"trainable": make_state(value=2)["trainable"]})


def test_first_process_chooses_the_checkpoint_of_all(written, two, monkeypatch):
    """A file is not seen, or seen otherwise, by one process alone, as on a network's file system."""
    decided = []
    flip(chunk(two / "5"))

    def from_first(make):
        if jax.process_index() == 0:
            decided.append(json.dumps(make()))
        return json.loads(decided[-1])

    monkeypatch.setattr(processes, "from_first", from_first)
    found = []
    for rank, view in enumerate((two, written)):
        with reopen(view) as checkpointer:
            monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
            found.append(checkpointer.restore(abstract(make_state())))
            monkeypatch.undo() if rank else None
    assert [(one.step, one.data) for one in found] == [(3, {"next_index": 30})] * 2


def test_a_commit_that_takes_hours_is_waited_for(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(checkpoint.ocp, "AsyncCheckpointer", lambda _, async_options: given.append(async_options))
    reopen(tmp_path)
    assert given[0].timeout_secs >= 12 * 3600, "orbax's own limit, 20 minutes, holds for the hashes too"


def test_full_disk_is_refused_with_folder_and_bytes_and_keeps_earlier_checkpoints(tmp_path, capfd):
    """RLIMIT_FSIZE lets the kernel refuse a large write as it does on a full disk."""
    values = np.random.default_rng(0).normal(size=(401, 499)).astype(np.float32)
    state = {"trainable": {"w": jax.device_put(values)}}
    checkpointer = reopen(tmp_path)
    checkpointer.save(1, state, data={}, wait=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=f"{tmp_path}: checkpoint 2 .* {values.nbytes} bytes"):
            checkpointer.save(2, state, data={}, wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpointer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert "ERROR:absl" not in capfd.readouterr().err, "the one message is not buried under orbax's tracebacks"
    with reopen(tmp_path) as again:
        assert_same_bits(again.restore(abstract(state)).state, state)
        again.save(2, state, data={}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_disk_full_at_the_record_leaves_no_checkpoint(two, monkeypatch):
    with reopen(two) as checkpointer:
        checkpointer.restore(abstract(make_state()))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", tiny.no_space)
            with pytest.raises(UserError, match="checkpoint 7 does not fit"):
                checkpointer.save(7, make_state(value=7), data={}, wait=True)
        assert sorted(path.name for path in two.iterdir()) == ["3", "5"]
        checkpointer.save(7, make_state(value=7), data={}, wait=True)
    assert sorted(path.name for path in two.iterdir()) == ["3", "5", "7"]


def test_score_comes_afterwards_and_decides_the_best_of_those_that_are_not_damaged(tmp_path):
    fill(tmp_path, {1: float("nan"), 2: 1.0, 3: 2.0, 4: 3.0, 5: None}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]
    newest, best = restore(tmp_path), restore(tmp_path, best=True)
    assert (newest.step, newest.metrics) == (5, {})
    assert (best.step, best.metrics) == (2, {"nll": 1.0})
    assert_same_bits(best.state, make_state(value=2))
    for damaged, left in ((2, 4), (4, 5)):  # the next best, then the newest without a score
        flip(chunk(tmp_path / str(damaged)))
        assert restore(tmp_path, best=True).step == left
    (tmp_path / "5" / RECORD).unlink()
    with pytest.raises(UserError, match=str(tmp_path)) as caught:
        restore(tmp_path)
    assert all(f"checkpoint {step} is damaged" in str(caught.value) for step in (2, 4, 5))
