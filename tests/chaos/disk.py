"""Full disks and folders that cannot be written: one line, code 2, and nothing of what was whole is lost.

What this machine does not let us make is skipped.
"""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos import runs

SMALL = 24_000  # bytes: a log fits, a checkpoint's arrays do not


def refuse(argv: list[str], log: Path, *, prepare: Callable[[], None] | None = None) -> None:
    """Holds a command to the end of an error that the user can mend."""
    code = runs.finish(argv, log, prepare=prepare)
    text = log.read_text("utf-8", errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert (code, len(errors), "Traceback" in text) == (2, 1, False), text[-2000:]


def resume(config: Path, workdir: Path, whole: Path, log: Path) -> None:
    assert runs.finish(runs.train(config, workdir), log) == 0, log.read_text("utf-8")[-2000:]
    assert not runs.compare(workdir, whole)


def test_a_run_that_may_write_no_large_file_goes_on_where_it_may(config: Path, whole: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    refuse(runs.train(config, workdir), tmp_path / "log", prepare=functools.partial(runs.limit_files, SMALL))
    resume(config, workdir, whole, tmp_path / "again")


def test_a_run_whose_disk_fills_up_goes_on_where_it_is_larger(config: Path, whole: Path, tmp_path: Path) -> None:
    half = sum(512 * path.stat().st_blocks for path in whole.rglob("*")) // 2
    with mounted(tmp_path / "mount", f"size={half}") as done:
        if not done:
            pytest.skip("no file system can be mounted here: it takes root")
        refuse(runs.train(config, tmp_path / "mount" / "w"), tmp_path / "log")
        mount("remount,size=200m", tmp_path / "mount")
        resume(config, tmp_path / "mount" / "w", whole, tmp_path / "again")


@pytest.fixture(scope="module")
def read_only(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that nobody may write to, with the one of a run."""
    folder = tmp_path_factory.mktemp("read_only")
    with mounted(folder, "size=200m") as done:
        if not done and os.geteuid() == 0:
            pytest.skip("root may write anywhere, and no file system can be mounted here")
        shutil.copytree(whole, folder / "w")
        inside = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in () if done else inside:
            path.chmod(0o555)
        if done:
            mount("remount,ro", folder)
        yield folder
        for path in () if done else inside:
            path.chmod(0o755)


@pytest.mark.parametrize("verb", ["train", "train anew", "report", "export"])
def test_a_verb_that_writes_into_a_read_only_folder_is_refused(
    verb: str, read_only: Path, config: Path, tmp_path: Path
) -> None:
    workdir = read_only / "w"
    argv = {
        "train": [*runs.train(config, workdir), "--config.train.log_every=2"],
        "train anew": runs.train(config, read_only / "other"),
        "report": ["report", "--workdir", str(workdir)],
        "export": ["export", "--workdir", str(workdir), "--model", str(read_only / "model")],
    }
    refuse(argv[verb], tmp_path / "log")


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """Mounts a file system in memory; False where this machine does not let us."""
    folder.mkdir(parents=True, exist_ok=True)
    done = mount(options, folder)
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def mount(options: str, folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
