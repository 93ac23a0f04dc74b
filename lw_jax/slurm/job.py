"""One SLURM job made from a plan: size, command line, memory and time limit."""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from lw_jax.core import config, environment
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.planning.plans import Plan
from lw_jax.slurm import cluster_profile
from lw_jax.slurm.cluster_profile import Duration, Site, clock
from lw_jax.slurm.past_runs import Record
from lw_jax.training import checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Duration):
    """One training run on so many GPUs of so many nodes."""

    name: str
    command: tuple[str, ...]
    folder: Path  # where the command is run
    logs: Path
    nodes: int
    gpus: int  # of one node
    host_memory_bytes: int  # of one node
    memory_fraction: float  # of each card, for XLA
    origin: str  # one line: the plan behind the numbers


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of a job."""

    config: str  # FILE[:recipe]
    assignments: Mapping[str, str]  # path -> value of --config.path=value
    program: tuple[str, ...]  # what Python runs: the path of run.py, or -m and a module
    hours: float | None = None  # instead of the predicted ones


def make_job(
    plan: Plan, cfg: Config, *, workdir: Path, request: Request, site: Site, record: Record | None = None
) -> Job:
    """Returns the job of a plan; its placement, micro-batch and remat become flags of the command.

    Raises:
      UserError: nothing fits, or a number is unusable.
    """
    if plan.chosen is None:
        remedies = "".join(f"; {line}" for line in plan.describe_remedies())
        raise UserError(
            f"--target {plan.target}: no placement of this configuration fits, so there is no job to write. Take more "
            f"or larger GPUs, or shorter texts; python run.py plan --config {request.config} --target {plan.target} "
            f"shows why{remedies}."
        )
    hours, basis = _time(plan, steps=cfg.train.steps, requested=request.hours, record=record)
    step_seconds, checkpoint_seconds = cluster_profile.pace(hours, cfg.train)
    start_hours, done = 0.0, checkpoint.newest_step(workdir)
    if request.hours is None:
        hours, start_hours, basis = cluster_profile.hours_of_run(hours, basis, plan, cfg.train, done)
        if plan.caching_key and not done:
            basis += f", without filling the cache of {plan.caching_key}"
    method = "compiled" if plan.compiled else "estimated, not compiled"
    origin = f"plan {plan.target} ({method}): {plan.chosen.describe()}"
    python = "python" if site.setup else sys.executable  # setup lines activate an environment that has its own
    # All planned keys: the configuration file, which the job reads again, may set any of them.
    assignments = {**request.assignments, **plan.chosen.overrides()}
    flags = config.flags(assignments)
    return Job(
        name=clean_name(workdir.name),
        command=(python, *request.program, "train", "--config", request.config, *flags, "--workdir", str(workdir)),
        folder=Path.cwd(),  # the user's relative paths stay valid
        logs=workdir / "logs",
        nodes=plan.hosts,
        gpus=plan.per_host,
        host_memory_bytes=plan.host_memory_bytes,
        hours=hours,
        step_seconds=step_seconds,
        checkpoint_seconds=checkpoint_seconds,
        start_hours=start_hours,
        memory_fraction=max(environment.FRACTION, cfg.mesh.target_utilisation),
        origin=f"{origin}; {record.describe_memory(plan.chosen.peak_bytes)}" if record else origin,
        basis=basis,
    )


def clean_name(text: str) -> str:
    """Returns a job's name: sbatch ends a directive at a blank."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII) or "latentwire"


def _time(plan: Plan, *, steps: int, requested: float | None, record: Record | None) -> tuple[float, str]:
    """Returns the hours of all steps and their source: --hours, else a measurement, else the plan."""
    if requested is not None and record is not None:
        raise UserError(
            f"--hours {requested:g} and --measured {record.workdir}: each replaces the plan's time; give one of them."
        )
    hours, basis = plan.hours, "predicted"
    if requested is not None:
        hours, basis = requested, "given by --hours"
    elif record is not None:
        hours, basis = record.step_seconds * steps / 3600, record.describe()
    if hours is None or not (math.isfinite(hours) and hours > 0):
        name = "hours" if requested is None else "--hours"
        why = f"{plan.untimed}; " if plan.untimed and requested is None else ""
        rule = f"{why}a number above 0 is needed; give --hours H or --measured DIR."
        raise UserError(f"--target {plan.target}: {name} = {hours}: {rule}")
    return hours, basis


def describe_limit(job: Job, site: Site) -> str:
    time_limit = cluster_profile.limit(job, site)
    return f"time limit {clock(time_limit.minutes)}: {time_limit.description}"
