"""Several configurations as one SLURM job: an array, each on its own GPUs, or a sequence on the same GPUs."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from lw_jax.core.errors import UserError
from lw_jax.core.runtime import REQUEUE
from lw_jax.slurm import cluster_profile, job_script
from lw_jax.slurm.cluster_profile import Site
from lw_jax.slurm.job import Job, clean_name
from lw_jax.slurm.job_script import one_line


def join(jobs: Sequence[Job], kind: str, *, name: str, logs: Path) -> Job:
    """Returns the request to SLURM: the maximum over the tasks, and for a sequence the sum of their times.

    Raises UserError for tasks on different numbers of nodes or GPUs.
    """
    sizes = {(job.nodes, job.gpus) for job in jobs}
    if len(sizes) > 1:
        raise UserError(f"--config {name}.list: the plans need different machines, {sorted(sizes)}; name one --target")
    # Every task of a sequence starts anew; `limit` adds the first one's start.
    starts = cluster_profile.STARTUP_HOURS / cluster_profile.TIME_MARGIN * (len(jobs) - 1)
    hours = max(job.hours for job in jobs) if kind == "array" else sum(job.hours for job in jobs) + starts
    return dataclasses.replace(
        jobs[0],
        name=clean_name(name),
        logs=logs,
        hours=hours,
        host_memory_bytes=max(job.host_memory_bytes for job in jobs),
        step_seconds=max(job.step_seconds for job in jobs),
        checkpoint_seconds=max(job.checkpoint_seconds for job in jobs),
        memory_fraction=max(job.memory_fraction for job in jobs),
        origin=f"{len(jobs)} configurations of {name}.list as {kind}",
        basis=jobs[0].basis.replace(",", " ").split()[0],  # a word; the task's own line has the details
    )


def script(jobs: Sequence[Job], whole: Job, site: Site, kind: str) -> str:
    """Returns the text of the sbatch file; `whole` is the result of `join`."""
    extra = [f"#SBATCH --array=0-{len(jobs) - 1}"] if kind == "array" else []
    log = "%x-%A_%a" if kind == "array" else "%x-%j"
    body = _array(jobs, site) if kind == "array" else _sequence(jobs, site)
    return "\n".join([*job_script.head(whole, site, extra=extra, log=log), *body]) + "\n"


def _start(job: Job, site: Site) -> str:
    return f"{shlex.join(job_script.step(job, site))} \\\n        {shlex.join(job.command)}"


def _describe(job: Job) -> str:
    return one_line(f"{job.origin}; {job.hours:.2f} h {job.basis}")


def _array(jobs: Sequence[Job], site: Site) -> list[str]:
    lines = ["code=0", 'case "$SLURM_ARRAY_TASK_ID" in']
    for number, job in enumerate(jobs):
        lines += [f"{number})  # {_describe(job)}", f"    {_start(job, site)} || code=$? ;;"]
    again = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
    return [*lines, "esac", *job_script.dead_task(jobs[0]), *job_script.tail(again)]


def _sequence(jobs: Sequence[Job], site: Site) -> list[str]:
    """Returns the lines of a sequence: a failing task lets the next ones run, a stopped or killed one ends the job.

    A requeued job starts its finished tasks again; they find their last step done and exit at once.
    """
    lines = ["code=0 last=0 failed="]
    for job in jobs:
        lines += [
            f"# {_describe(job)}",
            f'if [ "$code" -ne {REQUEUE} ]; then',
            f"    code=0; {_start(job, site)} || code=$?",
            *(f"    {line}" for line in job_script.dead_task(job)),
            '    if [ "$code" -eq 0 ]; then code=$last',
            f'    elif [ "$code" -ne {REQUEUE} ]; then last=$code failed="$failed {job.name}($code)"; fi',
            "fi",
        ]
    return [*lines, '[ -z "$failed" ] || echo "failed:$failed" >&2', *job_script.tail('"$SLURM_JOB_ID"')]
