"""lw_jax/inference/export.py: which folders an export may take."""

import dataclasses
import fcntl
import re
from pathlib import Path

import pytest

from lw_jax.core.errors import UserError
from lw_jax.inference import export
from tests import tiny


def asked(root: Path, workdir: Path, folder: Path) -> None:
    """Exports a Test-Time-Training run without a checkpoint to a folder."""
    list(export.export(tiny.make_ttt_config(root), workdir, {"model": folder}))


@pytest.mark.parametrize("name", ["run", "notes"])
def test_a_folder_that_holds_something_else_is_left_alone(root, tmp_path, name):
    for folder in ("run", "notes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / name}: it") + "|the run needs this folder"):
        asked(root, tmp_path / "run", tmp_path / name)
    assert [file.name for file in (tmp_path / name).iterdir()] == ["config.json"]


def test_what_a_run_began_with_and_another_flag_s_folder_are_not_taken(root, tmp_path):
    for name in ("base", "first"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors", "wire.safetensors", "adapter_config.json"):
            (tmp_path / name / file).touch()
    started = tiny.make_ttt_config(root)
    started = dataclasses.replace(started, ttt=dataclasses.replace(started.ttt, source=str(tmp_path / "base")))
    joined = tiny.make_config(root, encoder__run=str(tmp_path / "first"))
    for cfg, flag, name in ((started, "model", "base"), (joined, "wire", "first")):
        with pytest.raises(UserError, match=f"{name}: the run needs this folder"):
            list(export.export(cfg, tmp_path / "run", {flag: tmp_path / name}))
    tuned = dataclasses.replace(joined, recipe="dpo")
    with pytest.raises(UserError, match="out: named by --peft and --merged"):
        list(export.export(tuned, tmp_path / "run", {"peft": tmp_path / "out", "merged": tmp_path / "out"}))


def test_an_empty_folder_is_taken_and_a_model_that_is_there_is_not_replaced(root, tmp_path):
    for folder in ("run", "model"):
        (tmp_path / folder).mkdir()
    with pytest.raises(UserError, match="checkpoint"):
        asked(root, tmp_path / "run", tmp_path / "model")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("of another model")
    with pytest.raises(UserError, match="model: it is not empty"):
        asked(root, tmp_path / "run", tmp_path / "model")


def test_folder_into_which_another_process_exports_is_refused(root, tmp_path):
    for name in ("run", "model"):
        (tmp_path / name).mkdir()
    with (tmp_path / "model" / export.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"model: another process is writing here.*--model"):
            asked(root, tmp_path / "run", tmp_path / "model")
        assert (tmp_path / "model" / export.LOCK).exists(), "a third one is refused as well"
    with pytest.raises(UserError, match="checkpoint"):  # one that was killed left nothing else there
        asked(root, tmp_path / "run", tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())
