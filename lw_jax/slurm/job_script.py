"""Text of the sbatch file of one job."""

import math
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lw_jax.core.errors import UserError
from lw_jax.core.runtime import REQUEUE
from lw_jax.hub import sources
from lw_jax.slurm import cluster_profile
from lw_jax.slurm.cluster_profile import PORTABLE, Site, clock
from lw_jax.slurm.job import Job, limit

# Chosen, not measured.
MEMORY_MARGIN = 1.25
PROCESS_GIB = 8  # Python, JAX, CUDA and its pinned buffers
WRITER = "# Written by LatentWire JAX"
RESTARTS = 10  # of a job; from this one on a killed task is a failure, not an accident


def script(job: Job, site: Site) -> str:
    """Returns the text of the sbatch file.

    Raises:
      UserError: the path of the logs has a character that sbatch reads as its own.
    """
    start = f"{shlex.join(step(job, site))} \\\n    {shlex.join(job.command)} || code=$?"
    return "\n".join([*head(job, site), "code=0", start, *dead_task(job), *tail('"$SLURM_JOB_ID"')]) + "\n"


def head(job: Job, site: Site, *, extra: Sequence[str] = (), log: str = "%x-%j") -> list[str]:
    """Returns all lines before training: what is asked for, modules and environment."""
    cache = Path(site.scratch) / "lw_jax" / "compiled" if site.scratch else sources.cache_root() / "compiled"
    local = ",".join(map(str, range(job.gpus)))
    several = [
        "# Of several tasks JAX gives each one GPU, the one of its number on the node, unless it is told otherwise.",
        f"export JAX_LOCAL_DEVICE_IDS={local}",
    ]
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
        "set -u  # only now: a site's own lines may not bear it",
        "",
        "# Every start after the first finds its programs compiled.",
        f"export JAX_COMPILATION_CACHE_DIR={shlex.quote(str(cache))}",
        'mkdir -p "$JAX_COMPILATION_CACHE_DIR"',
        "# XLA's own default is 0.75 of a card, less than the plan may use.",
        f"export XLA_PYTHON_CLIENT_MEM_FRACTION={job.memory_fraction:g}",
        *(several if job.nodes > 1 else []),
        "",
    ]


def step(job: Job, site: Site) -> list[str]:
    """Returns the words that start training on the job's nodes."""
    # A task that leaves first, saved, must not have the others killed while they save; those of a dead one end alone.
    several = ["--label", "--kill-on-bad-exit=0"] if job.nodes > 1 else []
    return ["srun", f"--cpus-per-task={job.gpus * site.cpus_per_gpu}", *several]


def dead_task(job: Job) -> list[str]:
    """Returns the lines that take a killed task of several for what the others say: to be requeued, within bounds."""
    if job.nodes < 2:
        return []
    return [
        f"# srun gives the highest code of its tasks: more than 128 where one was killed, while the others ended with "
        f"{REQUEUE}.",
        f'if [ "$code" -gt 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RESTARTS} ]; then code={REQUEUE}; fi',
    ]


def tail(job: str) -> list[str]:
    """Returns all lines after training; `job` is what SLURM knows the running job by, in the shell's words."""
    return [
        f"# {REQUEUE}: stopped on request and saved; the same command goes on from there.",
        f'if [ "$code" -eq {REQUEUE} ]; then',
        f'    echo "saved; job "{job}" goes back into the queue"',
        f'    scontrol requeue {job} || echo "not requeued: submit the same file again" >&2',
        "fi",
        'exit "$code"',
    ]


def _directives(job: Job, site: Site, *, log: str) -> list[str]:
    minutes, _, parts = limit(job, site)
    gib = job.host_memory_bytes / 2**30
    named = [(key, getattr(site, key)) for key in ("partition", "account", "qos", "constraint")]
    asked = [f"#SBATCH --{key}={value}" for key, value in named if value]
    logs = str(job.logs)
    if not logs.isprintable() or any(mark in logs for mark in '"\\'):
        raise UserError(f"--workdir {str(job.logs.parent)!r}: SLURM cannot take this path for its log; rename it.")
    return [
        f"#SBATCH --job-name={job.name}",
        *(asked or [f"# No site profile, or an empty one: {PORTABLE}"]),
        "# One task a node drives all its GPUs: a group of GPUs that shares weights lies within one process.",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH {site.gpus.format(count=job.gpus)}",
        f"#SBATCH --cpus-per-task={job.gpus * site.cpus_per_gpu}",
        f"# Of a node: {gib:.1f} GiB planned x {MEMORY_MARGIN} + {PROCESS_GIB} GiB for the process.",
        f"#SBATCH --mem={math.ceil(gib * MEMORY_MARGIN + PROCESS_GIB)}G",
        f"# {one_line(parts)}.",
        f"#SBATCH --time={clock(minutes)}",
        "# So long before the limit training (the step, not this shell) is asked to save and stop.",
        f"#SBATCH --signal=TERM@{cluster_profile.notice_seconds(job.step_seconds)}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f'#SBATCH --output="{logs.replace("%", "%%")}/{log}.log"',
    ]


def one_line(text: str) -> str:
    """Returns a text that cannot leave its line."""
    return " ".join(text.split())


def write(file: Path, text: str, *, logs: Path) -> None:
    """Writes the sbatch file and makes the folder of its logs."""
    try:
        if file.exists() and WRITER not in file.read_text(encoding="utf-8", errors="replace"):
            raise UserError(f"--output {file}: that file is not one of ours; choose another name.")
        logs.mkdir(parents=True, exist_ok=True)  # SLURM makes no folder for a log: the job would vanish without one
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; choose a writable --workdir or --output.") from error


def submit(file: Path) -> str:
    """Hands the file to sbatch and returns what that says."""
    try:
        done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(f"--submit: there is no sbatch here; on a login node: sbatch {file}") from error
    if done.returncode:
        raise UserError(f"--submit: sbatch {file}: {one_line(done.stderr)}; mend the site profile, see docs/slurm.md.")
    return done.stdout.strip()
