"""Text of the sbatch file of one job, or of several: an array, each on its own GPUs, or a sequence on the same ones."""

import dataclasses
import math
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lw_jax.core import environment
from lw_jax.core.errors import UserError, one_line
from lw_jax.core.runtime import REQUEUE
from lw_jax.hub import sources
from lw_jax.slurm import cluster_profile
from lw_jax.slurm.cluster_profile import PORTABLE, UNCOUNTED, Site, clock, limit
from lw_jax.slurm.job import Job, clean_name

# Chosen, not measured.
MEMORY_MARGIN = 1.25
PROCESS_GIB = 8  # Python, JAX, CUDA and its pinned buffers
WRITER = "# Written by LatentWire JAX"
KILLED = (137, 143, 253)  # codes of srun for a task that was ended from outside, see `dead_task`
RESTARTS = 10  # of a job beside those at its limit; from this one on a killed task is a failure, not an accident


def script(job: Job, site: Site) -> str:
    lines = [*head(job, site), "code=0", f"{start(job, site)} || code=$?"]
    return "\n".join([*lines, *dead_task(job, site), *tail('"$SLURM_JOB_ID"')]) + "\n"


def head(job: Job, site: Site, *, extra: Sequence[str] = (), log: str = "%x-%j") -> list[str]:
    cache = Path(site.scratch) / "lw_jax" / "compiled" if site.scratch else sources.cache_root() / "compiled"
    kept = [
        "# Later starts reuse the compiled programs.",
        f"export JAX_COMPILATION_CACHE_DIR={shlex.quote(str(cache))}",
        'mkdir -p "$JAX_COMPILATION_CACHE_DIR"',
    ]
    devices = ",".join(map(str, range(job.gpus)))
    several = ["# One task drives all GPUs of its node.", f"export JAX_LOCAL_DEVICE_IDS={devices}"]
    return [
        "#!/bin/bash",
        f"{WRITER}: python run.py slurm. {one_line(job.origin)}",
        *_directives(job, site, log=log),
        *extra,
        "",
        "set -eo pipefail",
        f"cd {shlex.quote(str(job.folder))}",
        *([f"module load {shlex.join(site.modules)}"] if site.modules else []),
        *site.setup,
        "set -u  # only now: the site's own lines may read unset variables",
        "",
        *(kept if job.nodes == 1 else []),
        "# XLA's default is 0.75 of a GPU, less than the plan may use; beside the older name it refuses to start.",
        "unset XLA_PYTHON_CLIENT_MEM_FRACTION",
        f"export XLA_CLIENT_MEM_FRACTION={job.memory_fraction:g}",
        "# The plan is for GPUs: without one training ends, and a JAX_PLATFORMS=cpu of the submitting shell goes.",
        "export JAX_PLATFORMS=cuda,cpu",
        "# Of an allocation in which this file was submitted: srun would read them as its options.",
        'unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_TRES_PER_TASK "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"',
        "unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU SLURM_GPU_BIND SLURM_TRES_BIND",
        "# Of sbatch --export=NONE: srun would leave out what is exported here.",
        "unset SLURM_EXPORT_ENV",
        *(several if job.nodes > 1 else []),
        "",
    ]


def start(job: Job, site: Site) -> str:
    # The first task to save and exit must not kill the others while they save.
    several = ["--label", "--kill-on-bad-exit=0"] if job.nodes > 1 else []
    words = ["srun", f"--cpus-per-task={job.gpus * site.cpus_per_gpu}", *several]
    return f"{shlex.join(words)} \\\n        {shlex.join(job.command)}"


def dead_task(job: Job, site: Site) -> list[str]:
    """Returns the lines that requeue a job of several tasks after one was killed, up to RESTARTS times.

    SLURM counts the requeues at the time limit too: those that are planned are added.

    A lost node gives srun no code: the others end with REQUEUE. Above 128 are also a task's own faults, as an abort
    (134): they would come back at every start.
    """
    if job.nodes < 2:
        return []
    killed, most = " || ".join(f'[ "$code" -eq {code} ]' for code in KILLED), RESTARTS + limit(job, site).requeues
    return [
        f"# srun returns its tasks' highest code, that of a killed one while the others ended with {REQUEUE}:",
        "# SIGKILL, SIGTERM, and what srun makes of a task that SLURM killed for its memory.",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ] && {{ {killed}; }}; then code={REQUEUE}; fi',
    ]


def tail(job: str) -> list[str]:
    """Returns the lines after training; `job` is a shell expression of the job's id."""
    kept = "it resumes from its last checkpoint, without one it begins anew"
    return [
        f"# {REQUEUE}: stopped on request, saved where there was a step to save, or a task was killed.",
        f'if [ "$code" -eq {REQUEUE} ]; then',
        f'    echo "job "{job}" goes back into the queue: {kept}"',
        f'    scontrol requeue {job} || echo "not requeued: submit the same file again" >&2',
        "fi",
        'exit "$code"',
    ]


def _directives(job: Job, site: Site, *, log: str) -> list[str]:
    minutes, _, parts = limit(job, site)
    gib = job.host_memory_bytes / 2**30
    named = [(key, getattr(site, key)) for key in ("partition", "account", "qos", "constraint")]
    options = [f"#SBATCH --{key}={value}" for key, value in named if value]
    signal = [
        "# Seconds before the limit at which training (the step, not this shell) gets the signal to save and stop.",
        f"#SBATCH --signal=TERM@{cluster_profile.notice_seconds(job.step_seconds)}",
    ]
    logs = str(job.logs)
    if not logs.isprintable() or any(mark in logs for mark in '"\\'):
        raise UserError(f"--workdir {str(job.logs.parent)!r}: SLURM cannot take this path for its log; rename it.")
    return [
        f"#SBATCH --job-name={job.name}",
        *(options or [f"# No site profile, or an empty one: {PORTABLE}"]),
        "# One task a node drives all its GPUs: a group of GPUs that shares weights lies within one process.",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH {site.gpus.format(count=job.gpus)}",
        f"#SBATCH --cpus-per-task={job.gpus * site.cpus_per_gpu}",
        f"# Of a node: {gib:.1f} GiB planned x {MEMORY_MARGIN} + {PROCESS_GIB} GiB for the process.",
        f"#SBATCH --mem={math.ceil(gib * MEMORY_MARGIN + PROCESS_GIB)}G",
        f"# {one_line(parts)}.",
        f"#SBATCH --time={clock(minutes)}",
        *(signal if job.step_seconds else []),  # it would end a start, which saves nothing on the way, at each requeue
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f'#SBATCH --output="{logs.replace("%", "%%")}/{log}.log"',
    ]


def write(file: Path, text: str, *, logs: Path) -> None:
    try:
        if file.exists() and WRITER not in file.read_text(encoding="utf-8", errors="replace"):
            raise UserError(f"--output {file}: this file was not written by `slurm`; choose another name.")
        logs.mkdir(parents=True, exist_ok=True)  # SLURM creates none, and the job would fail without a log
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; choose a writable --workdir or --output.") from error


def submit(file: Path) -> str:
    try:
        command, env = ["sbatch", str(file)], environment.of_job()
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    except FileNotFoundError as error:
        raise UserError(f"--submit: no sbatch here; run on a login node: sbatch {file}") from error
    if process.returncode:
        raise UserError(
            f"--submit: sbatch {file}: {one_line(process.stderr)}; correct the site profile, see docs/slurm.md."
        )
    return process.stdout.strip()


# --- several configurations


def join(jobs: Sequence[Job], kind: str, *, name: str, logs: Path) -> Job:
    """Returns the request to SLURM: the maximum over the tasks, and for a sequence the sum of their times.

    Raises UserError for tasks on different numbers of nodes or GPUs, and for runs with and without steps.
    """
    sizes = {(job.nodes, job.gpus) for job in jobs}
    if len(sizes) > 1:
        raise UserError(f"--config {name}.list: the plans need different machines, {sorted(sizes)}; name one --target")
    starts = [job.name for job in jobs if not job.step_seconds]
    if 0 < len(starts) < len(jobs):
        raise UserError(
            f"--config {name}.list: train.steps is 0 in {', '.join(starts)}: runs without steps save nothing on the "
            "way and get no signal, the others do: write two lists"
        )
    # Every task of a sequence starts anew; `limit` adds the first one's start.
    startup = cluster_profile.STARTUP_HOURS / cluster_profile.TIME_MARGIN * (len(jobs) - 1)
    hours = max(job.hours for job in jobs) if kind == "array" else sum(job.hours for job in jobs) + startup
    # Words; each task's own line has the details.
    basis, uncounted = jobs[0].basis.replace(",", " ").split()[0], [job.name for job in jobs if UNCOUNTED in job.basis]
    return dataclasses.replace(
        jobs[0],
        name=clean_name(name),
        logs=logs,
        hours=hours,
        host_memory_bytes=max(job.host_memory_bytes for job in jobs),
        step_seconds=max(job.step_seconds for job in jobs),
        checkpoint_seconds=max(job.checkpoint_seconds for job in jobs),
        start_hours=max(job.start_hours for job in jobs),
        memory_fraction=max(job.memory_fraction for job in jobs),
        origin=f"{len(jobs)} configurations of {name}.list as {kind}",
        basis=f"{basis}, {UNCOUNTED} ({', '.join(uncounted)})" if uncounted else basis,
    )


def list_script(jobs: Sequence[Job], whole: Job, site: Site, kind: str) -> str:
    """Returns the text of the sbatch file; `whole` is the result of `join`."""
    extra = [f"#SBATCH --array=0-{len(jobs) - 1}"] if kind == "array" else []
    log = "%x-%A_%a" if kind == "array" else "%x-%j"
    body = (_array if kind == "array" else _sequence)(jobs, whole, site)
    return "\n".join([*head(whole, site, extra=extra, log=log), *body]) + "\n"


def _describe(job: Job) -> str:
    return one_line(f"{job.origin}; {job.hours:.2f} h {job.basis}")


def _array(jobs: Sequence[Job], whole: Job, site: Site) -> list[str]:
    lines = ["code=0", 'case "$SLURM_ARRAY_TASK_ID" in']
    for number, job in enumerate(jobs):
        lines += [f"{number})  # {_describe(job)}", f"    {start(job, site)} || code=$? ;;"]
    again = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
    return [*lines, "esac", *dead_task(whole, site), *tail(again)]


def _sequence(jobs: Sequence[Job], whole: Job, site: Site) -> list[str]:
    """Returns the lines of a sequence: a failing task lets the next ones run, a stopped or killed one ends the job.

    A requeued job starts its finished tasks again; they find their last step done, load no model and exit.
    """
    lines = ["code=0 last=0 failed="]
    for job in jobs:
        lines += [
            f"# {_describe(job)}",
            f'if [ "$code" -ne {REQUEUE} ]; then',
            f"    code=0; {start(job, site)} || code=$?",
            *(f"    {line}" for line in dead_task(whole, site)),
            '    if [ "$code" -eq 0 ]; then code=$last',
            f'    elif [ "$code" -ne {REQUEUE} ]; then last=$code failed="$failed {job.name}($code)"; fi',
            "fi",
        ]
    return [*lines, '[ -z "$failed" ] || echo "failed:$failed" >&2', *tail('"$SLURM_JOB_ID"')]
