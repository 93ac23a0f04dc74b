"""Tiny training runs in processes that may be killed, limited or refused; what a run must have left at its end."""

import functools
import json
import multiprocessing
import os
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

PRELOADED = ["run", "lw_jax.commands.train"]  # of these modules none may start a device or a thread
PATIENCE = 300.0  # seconds of one start, on a machine busy with other work
STEPS, EVERY = 24, 4  # of a run, and between checkpoints
LOGGED = ("train/loss", "train/learning_rate", "validation/loss")  # of a row, what no clock decides


def write_config(folder: Path) -> Path:
    """Writes the configuration of a run of some seconds, with its text."""
    from tests import tiny  # here alone: the processes that are started import this module

    sizes = {"ttt__layers": 1, "ttt__width": 16, "ttt__heads": 2, "ttt__ffn": 24}
    every = {"train__eval_every": EVERY, "train__checkpoint_every": EVERY}
    return tiny.write_config(folder / "tiny.py", tiny.make_ttt_config(folder, train__steps=STEPS, **sizes, **every))


@functools.cache
def _context() -> Any:
    """Processes are forked from one that has imported the product: a start does not import JAX anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(argv: list[str], log: Path, *, prepare: Callable[[], None] | None = None) -> ForkServerProcess:
    """Starts the one command in a process of its own, after `prepare`; what it prints goes to `log`."""
    process = _context().Process(target=_command, args=(argv, str(log), prepare))
    process.start()
    return process


def finish(argv: list[str], log: Path, *, prepare: Callable[[], None] | None = None) -> int | None:
    """Starts the command and waits for its end; returns its code, or None where it had to be killed."""
    process = start(argv, log, prepare=prepare)
    process.join(PATIENCE)
    code = process.exitcode
    process.kill()
    return code


def train(config: Path, workdir: Path) -> list[str]:
    return ["train", "--config", str(config), "--workdir", str(workdir)]


def train_whole(config: Path, folder: Path) -> Path:
    """Returns the folder of an unbroken run."""
    whole, log = folder / "whole", folder / "whole.log"
    shutil.rmtree(whole, ignore_errors=True)
    if (code := finish(train(config, whole), log)) != 0:
        raise RuntimeError(f"the unbroken run ended with {code}; see {log}")
    return whole


def _command(argv: list[str], log: str, prepare: Callable[[], None] | None) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if prepare is not None:
        prepare()
    import run

    code = run.main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def limit_files(size: int) -> None:
    """Lets this process write no file of more bytes: as a disk that is full."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def final_state(workdir: Path) -> dict[str, bytes]:
    """Returns every array of the newest checkpoint by its path, as type, shape and bytes."""
    import orbax.checkpoint as ocp
    from jax.tree_util import keystr, tree_flatten_with_path

    newest = max(
        (path for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one device, as it was written on
        found: Any = checkpointer.restore(newest.absolute())
    leaves, _ = tree_flatten_with_path(found)
    told = {keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return {"step": newest.name.encode()} | {
        path: f"{leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes() for path, leaf in told.items()
    }


def logged(workdir: Path) -> list[tuple[int, dict[str, Any]]]:
    lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], {key: row[key] for key in LOGGED if key in row}) for row in rows]


def compare(workdir: Path, whole: Path) -> str:
    """Returns how a run's end differs from the unbroken run's; nothing where it does not."""
    got, want = final_state(workdir), final_state(whole)
    if got.keys() != want.keys():
        return f"other arrays: {sorted(got.keys() ^ want.keys())[:3]}"
    if other := [path for path in want if got[path] != want[path]]:
        return f"{len(other)} of {len(want)} arrays differ, as {other[0]}"
    rows, unbroken = logged(workdir), logged(whole)
    if [step for step, _ in rows] != [step for step, _ in unbroken]:
        return f"metrics of steps {[step for step, _ in rows]}, unbroken {[step for step, _ in unbroken]}"
    if rows != unbroken:
        return "metrics with other values"
    return ""
