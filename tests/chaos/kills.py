"""`kill -9` at any moment of a run and during its checkpoints: the same command must end as if nothing had been."""

import itertools
import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.chaos import runs

SEED, SECONDS = os.environ.get("CHAOS_SEED", "0"), 60 * float(os.environ.get("CHAOS_MINUTES", "1"))
KILLS = 100  # no more than about so many
RESERVE = 30.0  # seconds left for what was begun to end
AT_ONCE = 2  # runs
MOST = 8  # kills of one run, so that it ends
PAUSE = 0.02  # seconds, at most, after a checkpoint's folder has appeared

IN_CHECKPOINT = "checkpoint"
_comparing = threading.Lock()


def test_killed_runs_end_bit_equal_to_an_unbroken_one(config: Path, whole: Path, folder: Path) -> None:
    """Kills runs, one at least, for about SECONDS; what was begun is finished."""
    began = time.monotonic()
    runs.train_whole(config, folder)  # again: it finds all programs in the compile cache
    took = time.monotonic() - began
    found: list[tuple[list[str], str]] = []  # of each run: its kills, and what is wrong with its end
    numbers = itertools.count()

    def work() -> None:
        for number in numbers:
            kills = sum(len(told) for told, _ in found)
            if number and (time.monotonic() > began + SECONDS - RESERVE or kills >= KILLS):
                return
            found.append(kill(f"{SEED} {number}", config, folder / f"run-{number}", whole, took))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(work) for _ in range(AT_ONCE)]:
            done.result()
    kills = [one for told, _ in found for one in told]
    equal = sum(len(told) for told, fault in found if not fault)
    print(f"{equal} of {len(kills)} kills ended bit-equal ({kills.count(IN_CHECKPOINT)} in checkpoints)")
    assert kills and not [fault for _, fault in found if fault]


def kill(seed: str, config: Path, workdir: Path, whole: Path, took: float) -> tuple[list[str], str]:
    """Returns when a run was killed, and what is wrong with its end."""
    draw, log = random.Random(seed), workdir.with_suffix(".log")
    told: list[str] = []
    for _ in range(MOST):
        process = runs.start(runs.train(config, workdir), log)
        in_checkpoint, moment = draw.random() < 0.5, draw.uniform(0, took)
        if in_checkpoint:
            _wait_for_checkpoint(process, workdir, draw)
        else:
            process.join(moment)
        if not _kill(process):
            code = process.exitcode
            break
        told.append(IN_CHECKPOINT if in_checkpoint else f"{moment:.2f} s")
    else:
        code = runs.finish(runs.train(config, workdir), log)
    with _comparing:
        fault = f"code {code}" if code != 0 else runs.compare(workdir, whole)
    if not fault:
        shutil.rmtree(workdir)
        return told, ""
    return told, f"seed {seed}, killed at {', '.join(told)}: {fault}; {workdir}, {log}"


def _wait_for_checkpoint(process: ForkServerProcess, workdir: Path, draw: random.Random) -> None:
    """Returns while a checkpoint is being written; some are let pass first."""
    passed, known, until = draw.randrange(4), _unfinished(workdir), time.monotonic() + runs.PATIENCE
    while process.is_alive() and time.monotonic() < until:
        found = _unfinished(workdir)
        if found - known:
            if passed <= 0:
                time.sleep(draw.uniform(0, PAUSE))
                return
            passed -= 1
        known = found
        time.sleep(0.0005)


def _unfinished(workdir: Path) -> set[str]:
    """Returns the names of checkpoints that are being written, or that a kill has left."""
    folder = workdir / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if not name.isdecimal()}


def _kill(process: ForkServerProcess) -> bool:
    if process.exitcode is not None:
        return False
    process.kill()
    process.join()
    return process.exitcode == -9
