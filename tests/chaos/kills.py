"""`kill -9` at any moment of a run and during its checkpoints: the same command must end as if nothing had been."""

import dataclasses
import os
import random
import shutil
import threading
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.chaos import runs

MOST = 8  # kills of one run, so that it ends
PAUSE = 0.02  # seconds, at most, after a checkpoint's folder has appeared


@dataclasses.dataclass
class Tally:
    at_random: int = 0
    in_checkpoints: int = 0
    runs: int = 0
    equal: int = 0  # kills of runs whose end was equal
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.at_random + self.in_checkpoints


def run(*, seed: int, goal: int, seconds: float, folder: Path, parallel: int = 2) -> Tally:
    """Kills runs, one at least, until `goal` kills have been, for about so many seconds; what was begun is finished."""
    until = time.monotonic() + seconds
    config = runs.write_config(folder)
    runs.train_whole(config, folder)  # the second finds all programs in the compile cache
    began = time.monotonic()
    whole = runs.train_whole(config, folder)
    took = time.monotonic() - began
    tally, lock, numbers = Tally(), threading.Lock(), iter(range(10**6))

    def work() -> None:
        while True:
            with lock:
                number = next(numbers)
                if number and (time.monotonic() > until or tally.kills >= goal):
                    return
            _one(number, seed, config, folder, whole, took, tally, lock)

    threads = [threading.Thread(target=work) for _ in range(parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def _one(
    number: int, seed: int, config: Path, folder: Path, whole: Path, took: float, tally: Tally, lock: threading.Lock
) -> None:
    draw = random.Random(f"{seed} {number}")
    workdir, log = folder / f"run-{number}", folder / f"run-{number}.log"
    told: list[str] = []
    code: int | None = None
    for _ in range(MOST):
        process = runs.start(runs.train(config, workdir), log)
        in_checkpoint = draw.random() < 0.5
        moment = draw.uniform(0, took)
        killed = _kill_in_checkpoint(process, workdir, draw) if in_checkpoint else _kill_after(process, moment)
        code = process.exitcode
        if not killed:
            break
        told.append("checkpoint" if in_checkpoint else f"{moment:.2f} s")
        code = None
    if code is None:
        code = runs.finish(runs.train(config, workdir), log)
    with lock:
        fault = f"code {code}" if code != 0 else runs.compare(workdir, whole)
        tally.runs += 1
        tally.in_checkpoints += told.count("checkpoint")
        tally.at_random += len(told) - told.count("checkpoint")
        if fault:
            tally.faults.append(f"seed {seed}, run {number}, killed at {', '.join(told)}: {fault}; {workdir}, {log}")
        else:
            tally.equal += len(told)
            shutil.rmtree(workdir, ignore_errors=True)


def _kill_after(process: ForkServerProcess, seconds: float) -> bool:
    process.join(seconds)
    return _kill(process)


def _kill_in_checkpoint(process: ForkServerProcess, workdir: Path, draw: random.Random) -> bool:
    """Kills while a checkpoint is being written; some are let pass first."""
    passed, known, until = draw.randrange(4), _unfinished(workdir), time.monotonic() + runs.PATIENCE
    while process.is_alive() and time.monotonic() < until:
        found = _unfinished(workdir)
        if found - known:
            if passed <= 0:
                time.sleep(draw.uniform(0, PAUSE))
                break
            passed -= 1
        known = found
        time.sleep(0.0005)
    return _kill(process)


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
