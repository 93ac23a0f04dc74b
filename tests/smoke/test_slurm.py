"""The written sbatch file from submission to end, with stand-ins for srun and scontrol on PATH."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs import smoke
from lw_jax.commands import loading, parser, slurm
from lw_jax.core import config, runtime
from lw_jax.planning import planner
from lw_jax.planning.plans import StepCandidate, StepPlan
from lw_jax.slurm import size_comparison
from tests.commands import PROJECT
from tests.unit.slurm.test_job_script import directives

JOB_ID = "4711"
PATIENCE = 60  # seconds until a stand-in has started: two loaded cores import JAX in a few

# srun starts one task a node, hands the signal of the time limit to the tasks and returns the highest of their codes.
SRUN = """
import os, signal, subprocess, sys, time
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
given = {"SLURM_NTASKS": str(nodes), "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}
tasks = [subprocess.Popen(words, env={**os.environ, **given, "SLURM_PROCID": str(i)}) for i in range(nodes)]
if os.environ.get("LIMIT"):
    while not all(os.path.exists(os.environ["READY"] + str(i)) for i in range(nodes)):
        time.sleep(0.02)
        assert all(task.poll() is None for task in tasks)
    for task in tasks:
        task.send_signal(signal.SIGTERM)
sys.exit(max(128 - code if code < 0 else code for code in [task.wait() for task in tasks]))
"""

SCONTROL = """
import os, sys
open(HERE + "/scontrol", "a").write(" ".join(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("SCONTROL_CODE", "0")))
"""

# Training's stand-in: tells how it was called, then ends as MODE says; "wait" stops the way training does.
RUN = """
import json, os, sys, time
from pathlib import Path
here, rank = Path(__file__).parent, os.environ["SLURM_PROCID"]
kept = {key: value for key, value in os.environ.items() if key.startswith(("JAX_", "XLA_", "SLURM_", "NOTE"))}
(here / f"call{rank}.json").write_text(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "environ": kept}))
print("training", rank, flush=True)
if os.environ["MODE"] != "wait":
    sys.exit(int((os.environ["MODE"].split(",") * 2)[int(rank)]))
sys.path.insert(0, os.environ["PROJECT"])
from lw_jax.core import runtime
with runtime.Preemption() as preemption:
    Path(os.environ["READY"] + rank).touch()
    deadline = time.monotonic() + 60
    while not preemption.requested(0) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # saving
(here / "saved").touch()
sys.exit(runtime.REQUEUE if preemption.requested(0) else 1)
"""

CHOSEN = StepCandidate(
    strategy="fsdp", mesh="2x1", data=2, devices_used=2, micro_batch=5, accumulation=3, remat="full", step_seconds=7.0
)
PLAN = StepPlan(
    target="h100x2", devices=2, per_host=2, compiled=True, hours=3.2, host_memory_bytes=20 * 2**30, chosen=CHOSEN
)
QUESTION = 'it\'s {question}\nor "not" $HOME `id` $(id) a\\b * ; exit 9\n#SBATCH --account=other'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch) -> Path:
    """A cluster in a folder whose name has spaces, quotes of the shell and a percent sign."""
    here = tmp_path / "it's 100% here"
    programs, folder = here / "bin", here / "project folder"
    for made in (programs, folder):
        made.mkdir(parents=True)
    for name, code in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / f"{name}.py").write_text(f"HERE = {str(here)!r}{code}", encoding="utf-8")
        line = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "${{0}}.py" "$@"\n'
        (programs / name).write_text(line, encoding="utf-8")
        (programs / name).chmod(0o755)
    (folder / "run.py").write_text(RUN, encoding="utf-8")
    for key in [key for key in os.environ if key.startswith("SLURM_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PROJECT", str(PROJECT))
    monkeypatch.setenv("READY", str(here / "ready"))
    monkeypatch.chdir(folder)
    return here


@pytest.fixture
def write(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the job of a plan by the verb itself; returns the file."""

    def call(*, site: str = "", hosts: int = 1) -> Path:
        profile = cluster / "site.toml"
        profile.write_text(f'scratch = "{cluster}/scratch folder"\n{site}', encoding="utf-8")
        workdir = cluster / "runs" / "my run"
        spec = "configs/machines/h100x2.py"
        words = ["--config", spec, "--workdir", str(workdir), "--site", str(profile)]
        args = parser.parse(["slurm", *words, f"--config.prompt.user={QUESTION}"])
        cfg = config.build(smoke.get_config())
        plan = dataclasses.replace(PLAN, hosts=hosts, devices=2 * hosts)
        monkeypatch.setattr(planner, "make", lambda *_, **__: plan)
        monkeypatch.setattr(size_comparison, "other_sizes", lambda *_: [])  # seconds of arithmetic
        monkeypatch.setattr(slurm, "PROJECT", cluster / "project folder")
        slurm.run(args, loading.Loaded(spec, cfg, workdir, {}, {}, {}))
        return workdir / "job.sbatch"

    return call


def submit(file: Path) -> subprocess.Popen[bytes]:
    """Stands in for sbatch: a session of its own, output appended to the log, whose folder it does not make."""
    options = directives(file.read_text(encoding="utf-8"))
    marks = {"%%": "%", "%x": options["job-name"], "%j": JOB_ID}
    log = Path(re.sub("%.", lambda mark: marks[mark[0]], options["output"]))
    given = {"SLURM_JOB_ID": JOB_ID, "SLURM_JOB_NUM_NODES": options["nodes"]}
    with log.open("a") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        return subprocess.Popen(["/bin/bash", str(file)], env=os.environ | given, start_new_session=True, **streams)


def requeues(cluster: Path) -> list[str]:
    file = cluster / "scontrol"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def test_finished_job_has_called_training_with_the_exact_words_in_the_users_folder(cluster, write, monkeypatch) -> None:
    monkeypatch.setenv("MODE", "0")
    around = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE")
    around += ("SLURM_GPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPU_BIND", "SLURM_EXPORT_ENV")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in around:  # of the shell in which the file is submitted by hand
        monkeypatch.setenv(name, "7")
    file = write()
    assert submit(file).wait(PATIENCE) == 0
    assert requeues(cluster) == [] and "account" not in directives(file.read_text(encoding="utf-8"))
    log = cluster / "runs" / "my run" / "logs" / f"my-run-{JOB_ID}.log"
    assert log.read_text(encoding="utf-8") == "training 0\n"
    call = json.loads((cluster / "project folder" / "call0.json").read_text(encoding="utf-8"))
    assert call["cwd"] == str(cluster / "project folder")
    assert call["argv"] == [
        *("train", "--config", "configs/machines/h100x2.py", f"--config.prompt.user={QUESTION}"),
        *("--config.mesh.placement=fsdp", "--config.mesh.data=2", "--config.mesh.model=1"),
        *("--config.train.micro_batch=5", "--config.compute.remat=full", "--workdir", str(cluster / "runs" / "my run")),
    ]
    cache = cluster / "scratch folder" / "lw_jax" / "compiled"
    assert call["environ"]["JAX_COMPILATION_CACHE_DIR"] == str(cache) and cache.is_dir()
    assert call["environ"]["XLA_CLIENT_MEM_FRACTION"] == "0.92" and call["environ"]["SLURM_NTASKS"] == "1"
    assert call["environ"]["JAX_PLATFORMS"].startswith("cuda") and not call["environ"].keys() & set(around)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_time_limit_saves_and_requeues_once(cluster, write, monkeypatch, hosts: int) -> None:
    monkeypatch.setenv("MODE", "wait")
    monkeypatch.setenv("LIMIT", "1")
    file = write(hosts=hosts)
    assert submit(file).wait(PATIENCE) == runtime.REQUEUE
    assert directives(file.read_text(encoding="utf-8"))["nodes"] == str(hosts)
    assert (cluster / "project folder" / "saved").exists()
    calls = [cluster / "project folder" / f"call{rank}.json" for rank in range(hosts)]
    environs = [json.loads(file.read_text(encoding="utf-8"))["environ"] for file in calls]
    given = "0,1" if hosts > 1 else None  # or JAX would give each task of several nodes one GPU
    assert [(one["SLURM_PROCID"], one.get("JAX_LOCAL_DEVICE_IDS")) for one in environs] == [
        (str(rank), given) for rank in range(hosts)
    ]
    assert requeues(cluster) == [f"requeue {JOB_ID}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "codes", "code"),
    [
        (2, "143,75", runtime.REQUEUE),
        (2, "2,134", 134),  # JAX's abort where the first one was refused before it joined
        (1, "137", 137),
        (1, "1", 1),
        (1, "76", 76),
    ],
)
def test_killed_task_of_several_is_requeued_and_one_that_fails_is_not(
    cluster, write, monkeypatch, hosts: int, codes: str, code: int
) -> None:
    monkeypatch.setenv("MODE", codes)
    assert submit(write(hosts=hosts)).wait(PATIENCE) == code
    assert requeues(cluster) == ([f"requeue {JOB_ID}"] if code == runtime.REQUEUE else [])


def test_cancelled_job_saves_but_does_not_come_back(cluster, write, monkeypatch) -> None:
    """`scancel` sends SIGTERM to the batch shell and the steps alike: the shell dies of it before it could requeue."""
    monkeypatch.setenv("MODE", "wait")
    job = submit(write())
    wait_for(cluster / "ready0")
    os.killpg(job.pid, signal.SIGTERM)
    wait_for(cluster / "project folder" / "saved")
    assert job.wait(PATIENCE) == -signal.SIGTERM
    assert requeues(cluster) == []


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} did not come"
        time.sleep(0.02)


@pytest.mark.slow
def test_setup_runs_before_training_and_its_failure_ends_the_job(cluster, write, monkeypatch) -> None:
    monkeypatch.setenv("MODE", "0")
    programs = cluster / "bin"
    (programs / "python").write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    (programs / "python").chmod(0o755)
    assert submit(write(site="setup = [\"export NOTE='two words'\"]\n")).wait(PATIENCE) == 0
    call = cluster / "project folder" / "call0.json"
    assert json.loads(call.read_text(encoding="utf-8"))["environ"]["NOTE"] == "two words"
    call.unlink()
    assert submit(write(site='setup = ["source no/such/file"]\n')).wait(PATIENCE) == 1
    assert not call.exists()
