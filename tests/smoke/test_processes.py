"""Two real processes of four virtual devices each, joined as `srun` joins them, train as one device does."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import run
from lw_jax.commands import loading, parser
from lw_jax.core import config, launcher, runtime
from lw_jax.recipes.latentwire import LatentWire
from tests import tiny
from tests.commands import PROJECT

PATIENCE = 600  # seconds for both processes, on a machine busy with other work
STEPS = 6


@pytest.fixture(scope="module")
def config_path(root, tmp_path_factory) -> Path:
    """A file of a small configuration of one reader: each process compiles its programs for itself."""
    cfg = tiny.make_config(root, only="qwen", train__steps=STEPS, compute__dtype="fp32")
    return tiny.write_config(tmp_path_factory.mktemp("config") / "one.py", cfg)


def resolve(path: Path, *assignments: str) -> config.Config:
    (loaded,) = loading.load(parser.parse(["train", "--config", str(path), *assignments]))
    return loaded.cfg


def curve_of_one(path: Path, folder: Path, *assignments: str) -> list[float]:
    """The losses of the same configuration on one device of this process."""
    cfg = resolve(path, *assignments)
    code, losses, _ = tiny.curve(LatentWire(cfg, tiny.place(cfg)), folder)
    assert code == 0 and len(losses) == STEPS
    return losses


def free_job() -> str:
    """A SLURM job number whose coordinator's port, which `launcher.read` derives from it, is free."""
    for _ in range(50):
        job = random.randrange(4096)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 65535 - 4096 + 1 + job * launcher.STRIDE % 4096))
            return str(job)
    raise AssertionError("no free port in 50 tries")


@contextlib.contextmanager
def joined(
    *argv: str, folder: Path, devices: int = 4, ranks: Sequence[int] = (0, 1), code: str = ""
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts run.py, or other `code`, as one step of two tasks, or one of its `ranks`; their stderr lies in `folder`.

    None outlives the block.
    """
    program = ["-c", code] if code else [str(PROJECT / "run.py")]
    job = free_job()
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in ranks:
            step = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
            step |= {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            with (folder / f"stderr-{rank}").open("a") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-u", *program, *argv],
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env=os.environ | step | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(PROJECT)},
                )
            started.append(process)
        clock = threading.Timer(PATIENCE, lambda: [process.kill() for process in started])
        clock.start()
        yield started
        clock.cancel()
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def finish(started: list[subprocess.Popen[str]], folder: Path) -> tuple[list[int], str]:
    """(exit codes, what the first one has printed since), all processes at their end."""
    said = [process.communicate()[0] for process in started]
    codes = [process.returncode for process in started]
    print(
        *said, *((folder / f"stderr-{rank}").read_text() for rank in range(len(said))), sep="\n"
    )  # shown when a test fails
    return codes, said[0]


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one_device(config_path, root, tmp_path):
    changes = ["--config.encoder.kind=lm", f"--config.encoder.source={tiny.readers(root)['qwen']}"]
    changes.append("--config.adapter.start=aligned")
    argv = ["--config", str(config_path), "--config.mesh.placement=fsdp", *changes]
    with joined("train", *argv, "--workdir", str(tmp_path / "w"), folder=tmp_path) as started:
        codes, said = finish(started, tmp_path)
    assert codes == [0, 0]
    assert "placement fsdp: data=8" in said and said.count("device: 8 virtual devices") == 1
    assert [(tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1)] == ["", ""]
    wanted = curve_of_one(config_path, tmp_path / "one", *changes)
    np.testing.assert_allclose(tiny.logged_losses(tmp_path / "w"), wanted, rtol=tiny.LOSS)
    own, one = (tiny.logged_rows(tmp_path / name, "validation/loss") for name in ("w", "one"))
    assert [row["step"] for row in own] == [row["step"] for row in one] == [STEPS]
    assert own[0] == pytest.approx(one[0], rel=tiny.LOSS)
    check_evaluation_of_two(tmp_path)


def check_evaluation_of_two(folder: Path) -> None:
    """Of 11 examples in batches of 8 the second process has none in the last batch; each takes its rows alone."""
    shutil.copytree(folder / "w", folder / "w-one")
    asked = ["--config.eval.examples=11", "--config.eval.curve=f1", "--config.eval.curve_examples=10"]
    asked.append("--config.mesh.memory_gb=4")  # known, so that both agree on a batch before they begin
    with joined("eval", "--workdir", str(folder / "w"), *asked, folder=folder) as started:
        outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], (folder / "stderr-1").read_text()
    assert ["joint pick" in said or "held-out data: " in said for said in outputs] == [True, False]
    assert run.main(["eval", "--workdir", str(folder / "w-one"), *asked]) == 0
    for name in ("predictions.jsonl", "slots.json", "bytes.csv"):
        assert (folder / "w" / name).read_text() == (folder / "w-one" / name).read_text(), name
    of_two, of_one = (json.loads((folder / name / "eval.json").read_text()) for name in ("w", "w-one"))
    timed = [row.pop("first_token_seconds", None) for rows in of_one["rows"].values() for row in rows.values()]
    timed += [figures.pop(key) for figures in of_one["readers"].values() for key in ("faster", "timed_tokens")]
    assert any(timed) and of_two == of_one  # one process alone times a reader's first token


@pytest.mark.slow
def test_wait_to_join_is_told_and_ends_at_once_on_a_signal(config_path, tmp_path):
    argv = ["train", "--config", str(config_path), "--workdir", str(tmp_path / "w")]
    with joined(*argv, folder=tmp_path, ranks=[1]) as (waiting,):
        told, until = tmp_path / "stderr-1", time.monotonic() + PATIENCE
        while "of 2 waits" not in told.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(10) == runtime.REQUEUE
    assert "process 1 of 2" in told.read_text() and "Traceback" not in told.read_text()


# Two processes that join, and end.
JOINING = """
from lw_jax.core import environment
environment.hide_idle_cuda()
from lw_jax.core import processes, runtime

@processes.Together()
def main():
    assert runtime.start()

main()
"""


@pytest.mark.slow
def test_processes_join_past_the_proxies_of_a_cluster(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with joined(folder=tmp_path, devices=1, code=JOINING) as started:
        assert [process.wait(60) for process in started] == [0, 0]
    assert not [rank for rank in (0, 1) if "proxy" in (tmp_path / f"stderr-{rank}").read_text()]


# A second process whose compiler says half as much again, and whose processor rounds otherwise: alone it would take
# another placement and micro-batch, and start from other adapters.
OTHERWISE = """
import dataclasses, os, sys
import run
from lw_jax.core import environment
environment.leave_out_torch()
environment.hide_idle_cuda()  # as the command does, before anything imports JAX
if os.environ["SLURM_PROCID"] == "1":
    from lw_jax.training import memory
    measure = memory.measure
    def more(*args, **kwargs):
        found = measure(*args, **kwargs)
        return dataclasses.replace(found, by_mesh=tuple(3 * size // 2 for size in found.by_mesh))
    memory.measure = more
    from lw_jax.recipes import kv_start
    moments = kv_start.moments
    kv_start.moments = lambda sums: [x * (1 + 1e-6) for x in moments(sums)]
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_first_process_chooses_placement_micro_batch_and_start_for_both(config_path, tmp_path):
    argv = ["train", "--config", str(config_path), "--workdir", str(tmp_path / "w"), "--config.mesh.placement=auto"]
    argv += ["--config.compute.remat=auto", "--config.mesh.memory_gb=0.016", "--config.train.micro_batch=0"]
    argv += ["--config.adapter.kind=kv"]
    with joined(*argv, folder=tmp_path, devices=1, code=OTHERWISE) as started:
        codes, said = finish(started, tmp_path)
    assert codes == [0, 0]
    assert "is the largest that fits" in said and len(tiny.logged_losses(tmp_path / "w")) == STEPS


@pytest.mark.slow
def test_sigterm_saves_in_both_and_the_same_command_gives_the_curve_of_one_device(config_path, tmp_path):
    """Tensor parallel inside a process, accumulated over micro-batches, interrupted: none of it shows in the curve."""
    argv = ["train", "--config", str(config_path), "--config.mesh.placement=tensor", "--config.mesh.model=2"]
    argv += ["--config.train.micro_batch=1", "--workdir", str(tmp_path / "w")]
    with joined(*argv, folder=tmp_path) as started:
        assert started[0].stdout is not None
        for line in started[0].stdout:
            if line.startswith("global batch"):  # before the first step: JAX looks once a second for the signal
                time.sleep(0.5)  # to the loop, before which a process would end at once
                for process in started:
                    process.send_signal(signal.SIGTERM)
                break
        codes, said = finish(started, tmp_path)
    assert codes == [runtime.REQUEUE, runtime.REQUEUE]
    saved = max(int(path.name) for path in (tmp_path / "w" / "checkpoints").iterdir())
    assert saved < STEPS and re.search(rf"at step {saved}\b", said)
    with joined(*argv, folder=tmp_path) as started:
        codes, said = finish(started, tmp_path)
    assert codes == [0, 0]
    assert re.search(rf"from step {saved}\b", said) and "placement tensor: data=4" in said
    wanted = curve_of_one(config_path, tmp_path / "one")
    np.testing.assert_allclose(tiny.logged_losses(tmp_path / "w"), wanted, rtol=tiny.LOSS)


# Two processes that compute together without end; `alive-RANK` says that the first sums are done.
COMPUTING = """
import sys
from pathlib import Path
from lw_jax.core import environment
environment.hide_idle_cuda()
import jax
import jax.numpy as jnp
import numpy as np
from lw_jax.core import processes, runtime

@processes.Together()
def main():
    assert runtime.start()
    split = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), jax.sharding.PartitionSpec("data"))
    values = jax.make_array_from_callback((jax.device_count(),), split, lambda _: np.ones(1, np.float32))
    add = jax.jit(lambda x: jnp.zeros_like(x) + x.mean(), out_shardings=split)
    while True:
        values = jax.block_until_ready(add(values))
        (Path(sys.argv[1]) / f"alive-{jax.process_index()}").touch()

main()
"""


@pytest.mark.slow
def test_death_of_one_ends_the_other_with_one_line_and_the_code_for_requeueing(tmp_path):
    with contextlib.ExitStack() as stack:
        pairs = []
        for dead in (0, 1):  # the coordinator, and another one
            folder = tmp_path / str(dead)
            folder.mkdir()
            pairs.append(stack.enter_context(joined(str(folder), folder=folder, code=COMPUTING)))
        for dead, pair in enumerate(pairs):
            folder = tmp_path / str(dead)
            until = time.monotonic() + PATIENCE
            while not all((folder / f"alive-{rank}").exists() for rank in (0, 1)) and time.monotonic() < until:
                time.sleep(0.02)
            before = len((folder / f"stderr-{1 - dead}").read_text().splitlines())
            pair[dead].kill()
            assert pair[1 - dead].wait(60) == runtime.REQUEUE
            lines = (folder / f"stderr-{1 - dead}").read_text().splitlines()[before:]
            lines = [line for line in lines if not re.match(r"[IWE]\d{4} |WARNING: All log messages", line)]  # of C++
            assert len(lines) == 1 and f"process {dead} of 2 is gone" in lines[0], lines


@pytest.mark.slow
def test_folder_of_another_run_is_refused_by_both_with_code_2(config_path, tmp_path):
    """Read in the first process alone, after it has joined: the other one would wait for it and abort."""
    workdir = tiny.start_folder(tmp_path / "w", resolve(config_path, "--config.seed=7"))
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with joined("train", "--config", str(config_path), "--workdir", str(workdir), folder=tmp_path) as started:
        codes, _ = finish(started, tmp_path)
    assert codes == [2, 2]
    for rank in (0, 1):
        told = (tmp_path / f"stderr-{rank}").read_text()
        assert "the run there differs in seed: 7 -> 0" in told and "Traceback" not in told
