import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from configs import base
from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.training import run_folder
from tests import tiny

ROOT = Path(__file__).parents[3]


def _build(**changes: Any) -> config.Config:
    values = base.get_config()
    values.llms.llama = base.llm("folder/llama")
    values.encoder.source = "folder/encoder"
    values.update_from_flattened_dict(changes)
    return config.build(values)


def _write(folder: Path, cfg: config.Config) -> None:
    run_folder.write_workdir(folder, cfg=cfg, base=base.get_config().to_dict(), command=["run.py", "a b"])


def test_folder_tells_configuration_difference_command_and_versions(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    cfg = _build(seed=7)
    _write(folder, cfg)
    assert run_folder.read_config(folder) == cfg
    assert "seed: 0 -> 7" in (folder / "config.diff").read_text(encoding="utf-8").splitlines()
    assert (folder / "command.txt").read_text(encoding="utf-8") == "run.py 'a b'\n"
    assert {"python", "jax", "flax"} <= json.loads((folder / "versions.json").read_text(encoding="utf-8")).keys()
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/5/record"])
def test_other_run_in_the_same_folder_is_refused_and_nothing_is_overwritten(tmp_path: Path, left: str) -> None:
    _write(tmp_path, _build(seed=7))
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text('{"step": 5}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"seed: 7 -> 8.*name another --workdir"):
        _write(tmp_path, _build(seed=8))
    assert run_folder.read_config(tmp_path).seed == 7
    _write(tmp_path, _build(seed=7, **{"mesh.data": 2}))  # the same run on another machine
    assert run_folder.read_config(tmp_path).mesh.data == 2
    with pytest.raises(UserError, match=r"eval\.examples=\d+ there, 3 here"):
        _write(tmp_path, _build(seed=7, **{"eval.examples": 3}))  # scores would be of other examples


def test_other_held_out_examples_are_refused_and_eval_is_named_where_it_takes_the_run(tmp_path: Path) -> None:
    values = base.get_config("dpo")
    values.llms.policy = base.llm("folder/policy")
    _write(tmp_path, config.build(values))
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n', encoding="utf-8")
    values.eval.examples = 3
    with pytest.raises(UserError, match=r"eval\.examples=64 there, 3 here") as refusal:
        _write(tmp_path, config.build(values))
    assert "`eval`" not in str(refusal.value), "it evaluates wires alone"


def test_a_run_whose_configuration_is_lost_goes_on_as_its_checkpoints_say_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    _write(tmp_path, _build(seed=7))
    assert run_folder.read_config(tmp_path).seed == 7


def test_mended_configuration_of_a_run_that_was_refused_before_it_trained_is_accepted(tmp_path: Path) -> None:
    _write(tmp_path, _build(seed=7))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    _write(tmp_path, _build(seed=8))
    assert run_folder.read_config(tmp_path).seed == 8
    assert "seed: 0 -> 8" in (tmp_path / "config.diff").read_text(encoding="utf-8").splitlines()


def test_config_of_a_model_s_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json: "):
        _write(tmp_path, _build())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"version": 1, "recipe": "latentwire"}', "[" * 100_000])
def test_missing_or_damaged_configuration_is_refused_with_its_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json: "):
        run_folder.read_config(tmp_path)


@pytest.mark.parametrize("version", [2, "1"])
def test_configuration_of_another_version_is_refused(tmp_path: Path, version: object) -> None:
    _write(tmp_path, _build())
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(saved | {"version": version}), "utf-8")
    with pytest.raises(UserError, match=rf"config\.json: version={version!r}: "):
        run_folder.read_config(tmp_path)


LOCKED = """
import sys, time
from pathlib import Path
from lw_jax.training import run_folder

run_folder.lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_second_run_in_a_folder_is_refused_by_name_and_a_killed_one_s_lock_is_taken(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "locked\n"
            with pytest.raises(UserError) as raised:
                run_folder.lock(tmp_path)
            run_folder.lock(tmp_path, run_folder.EVAL_LOCK)  # a run under way can be evaluated
        finally:
            other.kill()
    told = str(raised.value)
    assert f"process {other.pid} on {socket.gethostname()}" in told and "since 20" in told and "--workdir" in told
    run_folder.lock(tmp_path)
    run_folder.lock(tmp_path)
    assert json.loads((tmp_path / run_folder.LOCK).read_text("utf-8"))["process"] == os.getpid()


def test_lock_on_a_full_disk_is_refused_by_file_and_let_go(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=rf"{run_folder.LOCK}: No space left"):
        patch.setattr(os, "write", tiny.no_space)
        run_folder.lock(tmp_path)
    run_folder.lock(tmp_path)


def test_lock_is_writable_for_a_group_whose_umask_says_so(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        run_folder.lock(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / run_folder.LOCK).stat().st_mode & 0o777 == 0o664


def test_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run" / run_folder.LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError):
        run_folder.lock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "kept"


def test_folder_in_which_nothing_can_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    run_folder.check_writable(tmp_path / "new" / "folder", remedy="r")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        run_folder.check_writable(tmp_path / "file", remedy="r")
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        _write(tmp_path / "file" / "run", _build())

    def refuse(**_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"Read-only file system.*copy it"):
        run_folder.check_writable(tmp_path, remedy="copy it")


def test_results_of_another_wire_are_not_taken_for_a_new_run_s(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(UserError, match=r"eval\.json: results of weights that are not here"):
        run_folder.check_run(_build(), tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')  # the run's own, whose checkpoints are gone
    with pytest.raises(UserError, match=r"eval\.json: results of weights that are not here"):
        run_folder.check_run(_build(), tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    run_folder.check_run(_build(), tmp_path)
