"""Full disks and folders that cannot be written: one line, code 2, and nothing of what was whole is lost."""

import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.chaos import runs

SMALL = 24_000  # bytes: a log fits, a checkpoint's arrays do not


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    holds: bool | None  # None: skipped
    detail: str
    reproduce: str = ""


def run(folder: Path) -> list[Check]:
    """Tries all of them; those that this machine cannot make are told as skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    config = runs.write_config(folder)
    whole = runs.train_whole(config, folder)
    return [_limited(config, whole, folder), _full(config, whole, folder), *_read_only(config, whole, folder)]


def _limited(config: Path, whole: Path, folder: Path) -> Check:
    """A process that may write no large file, as under a quota; then the same command without."""
    workdir, log = folder / "limited", folder / "limited.log"
    name, again = f"no file above {SMALL:,} bytes, then any", f"see {log}"
    code = runs.finish(runs.train(config, workdir), log, prepare=functools.partial(runs.limit_files, SMALL))
    if fault := _told(code, log):
        return Check(name, False, fault, again)
    return _resumed(name, config, workdir, whole, folder / "limited-again.log")


def _full(config: Path, whole: Path, folder: Path) -> Check:
    """A file system that fills up in the middle of the run; then a larger one."""
    mount, log, name = folder / "mount", folder / "full.log", "a disk of half of what a run leaves, then a larger one"
    half = sum(512 * path.stat().st_blocks for path in whole.rglob("*")) // 2
    with _mounted(mount, f"size={half}") as done:
        if not done:
            return Check(name, None, "no file system can be mounted here: it takes root")
        if fault := _told(runs.finish(runs.train(config, mount / "w"), log), log):
            return Check(name, False, fault, f"see {log}")
        _mount("remount,size=200m", mount)
        return _resumed(name, config, mount / "w", whole, folder / "full-again.log")


def _read_only(config: Path, whole: Path, folder: Path) -> Iterator[Check]:
    """The verbs that write, in a run's folder that nobody may write to."""
    mount = folder / "read-only"
    with _mounted(mount, "size=200m") as done:
        if not done and os.geteuid() == 0:
            yield Check("a read-only folder", None, "root may write anywhere, and no file system can be mounted here")
            return
        workdir = mount / "w"
        shutil.copytree(whole, workdir, dirs_exist_ok=True)
        if done:
            _mount("remount,ro", mount)
        else:
            _chmod(workdir, 0o555)
        longer = "--config.train.log_every=2"
        for verb, argv in {
            "train": [*runs.train(config, workdir), longer],
            "train anew": runs.train(config, mount / "other"),
            "report": ["report", "--workdir", str(workdir)],
            "export": ["export", "--workdir", str(workdir), "--model", str(mount / "model")],
        }.items():
            log = folder / f"read-only-{verb.replace(' ', '-')}.log"
            fault = _told(runs.finish(argv, log), log)
            yield Check(f"read-only folder: {verb}", not fault, fault or "code 2, one line", f"see {log}")
        if not done:
            _chmod(workdir, 0o755)


def _told(code: int | None, log: Path) -> str:
    """Returns what is wrong with how a process has ended that the user can help; nothing where all is right."""
    text = log.read_text("utf-8", errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if code != 2:
        return f"code {code}, last line {text.strip().splitlines()[-1:]}"[:300]
    if "Traceback" in text:
        return f"{text.count('Traceback')} tracebacks above the line"
    return "" if len(errors) == 1 else f"{len(errors)} lines of error"


def _resumed(name: str, config: Path, workdir: Path, whole: Path, log: Path) -> Check:
    code = runs.finish(runs.train(config, workdir), log)
    fault = f"code {code}" if code != 0 else runs.compare(workdir, whole)
    return Check(name, not fault, fault or "code 2, one line; resumed to a bit-equal end", f"see {log}")


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[bool]:
    """Mounts a file system in memory; False where this machine does not let us."""
    folder.mkdir(parents=True, exist_ok=True)
    done = sys.platform == "linux" and os.geteuid() == 0 and _mount(options, folder)
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def _mount(options: str, folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _chmod(folder: Path, mode: int) -> None:
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(mode)
