"""A process of two dies: the other must end soon, say why in one line, and with the code that requeues the job."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

from lw_jax.core.runtime import REQUEUE
from tests.chaos import runs
from tests.chaos.runs import Check

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0  # that the survivor has
PATIENCE = 90.0
ENDLESS = 10**6  # steps: nobody ends by himself


def run(folder: Path, *, seconds: float) -> list[Check]:
    """Kills rank 1, then, where so many seconds suffice, rank 0 of a run of two processes while it trains."""
    folder.mkdir(parents=True, exist_ok=True)
    config = runs.write_config(folder)
    until = time.monotonic() + seconds
    found = [_kill(1, config, folder)]
    if time.monotonic() + 2 * PATIENCE > until:
        return [*found, Check("rank 0 of two dies", None, "no time left")]
    return [*found, _kill(0, config, folder)]


def _kill(dying: int, config: Path, folder: Path) -> Check:
    name, job, workdir = f"rank {dying} of two dies", _free_job(), folder / f"without-{dying}"
    logs = [folder / f"without-{dying}-rank-{rank}.log" for rank in (0, 1)]
    argv = ["train", "--config", str(config), "--workdir", str(workdir), f"--config.train.steps={ENDLESS}"]
    argv += ["--config.mesh.placement=replicate", "--config.train.checkpoint_every=50", "--config.train.eval_every=0"]
    started = []
    try:
        for rank, log in enumerate(logs):
            step = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
            step |= {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            with log.open("w") as out:
                command = [sys.executable, "-u", str(ROOT / "run.py"), *argv]
                env = os.environ | step | {"JAX_NUM_CPU_DEVICES": "1"}
                started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env))
        if not _wait_for_step(workdir, started):
            return Check(name, False, f"no step in {PATIENCE:.0f} s", f"see {logs[0]}")
        started[dying].kill()
        began, survivor = time.monotonic(), started[1 - dying]
        with contextlib.suppress(subprocess.TimeoutExpired):
            survivor.wait(PATIENCE)
        took, text = time.monotonic() - began, logs[1 - dying].read_text("utf-8", errors="replace")
        good = survivor.returncode == REQUEUE and took <= SECONDS and "Traceback" not in text
        last = (text.strip().splitlines() or [""])[-1][:160]
        detail = f"the other ended after {took:.0f} s with code {survivor.returncode}: {last}"
        return Check(name, good, detail, f"see {logs[1 - dying]}")
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait_for_step(workdir: Path, started: list[subprocess.Popen[bytes]]) -> bool:
    until, log = time.monotonic() + PATIENCE, workdir / "metrics.jsonl"
    while time.monotonic() < until and all(process.poll() is None for process in started):
        if log.exists() and log.read_bytes().count(b"\n") >= 3:
            return True
        time.sleep(0.05)
    return False


def _free_job() -> str:
    """Returns a SLURM job number whose coordinator's port, which JAX derives from it, is free."""
    for _ in range(50):
        job = random.randrange(4096)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 65535 - 4096 + 1 + job))
            return str(job)
    raise RuntimeError("no free port in 50 tries")
