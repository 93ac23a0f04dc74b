"""The command `slurm`: writes the sbatch file of a planned training run, or of a list of them."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lw_jax.commands.loading import PROJECT, Loaded, is_list, list_workdir
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.planning import start_plan
from lw_jax.planning.planner import Plan, inspect, make, resolve_target
from lw_jax.slurm import job_list, job_script, past_runs, size_comparison
from lw_jax.slurm.cluster_profile import PORTABLE, Site, find_site
from lw_jax.slurm.job import Job, Request, describe_limit, make_job, make_start_job
from lw_jax.slurm.job_list import Task
from lw_jax.slurm.past_runs import Record
from lw_jax.training import preflight
from sharding.errors import PlacementError

Planner = Callable[[Config, str], Plan]


def run(args: argparse.Namespace, *loaded: Loaded) -> None:
    """Runs the command with its flags, for one configuration or the several of a list."""
    request = Request(
        config=args.config or "",
        assignments=args.assignments,
        project=PROJECT,
        target=args.target or "",
        site=args.site or "",
        submit=args.submit,
        output=args.output or "",
        hours=args.hours,
        measured=Path(args.measured) if args.measured else None,
    )
    if is_list(args):
        tasks = [Task(one.cfg, one.resolved, one.workdir, one.spec) for one in loaded]
        main_list(tasks, kind=args.jobs or "array", workdir=list_workdir(args), request=request)
    else:
        (one,) = loaded
        main(one.cfg, resolved=one.resolved, workdir=one.workdir, request=request)


def main(
    cfg: Config,
    *,
    resolved: Mapping[str, Any],
    workdir: Path,
    request: Request,
    planner: Planner | None = None,
    others: Sequence[Plan] | None = None,
) -> None:
    """Writes the sbatch file of a planned training run, prints its price, and submits it when asked to.

    Args:
        planner: returns the plan of a target; None: `lw_jax.planning.planner.make`.
        others: plans of other sizes to compare with; None: 1, 2 and 4 GPUs.

    Raises:
        UserError: the run's result would be void, nothing fits, or a number is unusable.
    """
    site, profile = find_site(request.site)
    if not cfg.train.steps:
        _write_start(Task(cfg, resolved, workdir, request.config), request, site, profile)
        return
    warnings = _check({"": cfg}, submit=request.submit)
    task = Task(cfg, resolved, workdir, request.config)
    plan, record, job = _plan_job(task, request.measured, request=request, site=site, planner=planner)
    file = Path(request.output).absolute() if request.output else workdir.absolute() / "job.sbatch"
    job_script.write(file, job_script.script(job, site), logs=job.logs)
    print(f"{_describe_file(file, profile)}\n{job.origin}\n{describe_limit(job, site)}")
    notes = [*(record.describe_differences() if record else ()), *warnings]
    print("".join(f"{line}\n" for line in notes), end="")
    try:
        others = size_comparison.other_sizes(cfg, plan) if others is None else others
    except UserError as error:  # the job is written: a table alone may be missing
        print(f"other sizes are not compared: {error}")
        others = []
    print("\n".join(size_comparison.compare([plan, *others], hours=job.hours)))
    used = plan["chosen"]["devices_used"]
    if used < plan["devices"]:
        card = plan["target"].rpartition("x")[0]
        print(f"{used} of the {plan['devices']} GPUs do the work: --target {card}x{used} costs less")
    if request.submit:
        print(job_script.submit(file))


def _write_start(task: Task, request: Request, site: Site, profile: str) -> None:
    """Writes the sbatch file of a run without steps, and submits it when asked to."""
    if request.measured:
        raise UserError(f"--measured {request.measured}: config.train.steps = 0 has no step to take from it; --hours H")
    plan = start_plan.of_target(task.cfg, resolve_target(request.target, config=task.config))
    job = make_start_job(plan, resolved=task.resolved, workdir=task.workdir.absolute(), request=request, site=site)
    file = Path(request.output).absolute() if request.output else task.workdir.absolute() / "job.sbatch"
    job_script.write(file, job_script.script(job, site), logs=job.logs)
    print(f"{_describe_file(file, profile)}\n{job.origin}\n{describe_limit(job, site)}")
    if request.submit:
        print(job_script.submit(file))


def main_list(
    tasks: Sequence[Task],
    *,
    kind: str,
    workdir: Path,
    request: Request,
    planner: Planner | None = None,
) -> None:
    """Writes one sbatch file for several configurations, prints the predicted time of each, and may submit it.

    Args:
        kind: one of `job_list.KINDS`.
        request: of all tasks; its `measured` folder holds one folder a task.
    """
    site, profile = find_site(request.site)
    jobs, notes = [], _check({task.workdir.name: task.cfg for task in tasks}, submit=request.submit)
    for task in tasks:
        name = task.workdir.name
        measured = request.measured / name if request.measured else None
        try:
            _, record, job = _plan_job(task, measured, request=request, site=site, planner=planner)
        except PlacementError as error:
            raise UserError(f"no job was written: {name}: {error}") from error
        jobs.append(job)
        notes += [f"{name}: {line}" for line in (record.describe_differences() if record else ())]
    whole = job_list.join(jobs, kind, name=Path(request.config).stem, logs=workdir.absolute() / "logs")
    file = Path(request.output).absolute() if request.output else workdir.absolute() / f"{kind}.sbatch"
    job_script.write(file, job_list.script(jobs, whole, site, kind), logs=whole.logs)
    print(_describe_file(file, profile))
    for job in jobs:
        memory = job.host_memory_bytes / 2**30
        print(f"  {job.name}: {job.hours:.2f} h {job.basis}, {memory:.0f} GiB of host memory; {job.origin}")
    each = "each task" if kind == "array" else f"all {len(jobs)} together"
    print("".join(f"{line}\n" for line in notes) + f"of {each}: {describe_limit(whole, site)}")
    if request.submit:
        print(job_script.submit(file))


def _plan_job(
    task: Task, measured: Path | None, *, request: Request, site: Site, planner: Planner | None
) -> tuple[Plan, Record | None, Job]:
    """Returns a task's plan, the record of its earlier run in `measured`, if that is given, and its job."""
    plan = (planner or make)(task.cfg, resolve_target(request.target, config=task.config))
    record = past_runs.read(measured, task.cfg, plan) if measured else None
    own, folder = dataclasses.replace(request, config=task.config), task.workdir.absolute()
    return plan, record, make_job(plan, resolved=task.resolved, workdir=folder, request=own, site=site, record=record)


def _check(runs: Mapping[str, Config], *, submit: bool) -> list[str]:
    """Returns warnings about the runs, by name; a run's name may be empty where there is only one.

    A missing data file is a warning, because the job may be queued where other folders are mounted; of a job that is
    submitted at once it is an error.

    Raises:
        UserError: the result of any run would be void; names every such run.
    """
    errors, warnings = [], []
    for name, cfg in runs.items():
        where = f"{name}: " if name else ""
        for one in inspect(cfg):
            (errors if one.severity == "error" else warnings).append(f"{where}{one.text}")
        absent = [f"{where}{one.text}" for one in preflight.missing_data(cfg)]
        (errors if submit else warnings).extend(absent)
    if errors:
        raise UserError(f"no job was written: {'; '.join(errors)}")
    return [f"warning: {line}" for line in warnings]


def _describe_file(file: Path, profile: str) -> str:
    """Returns the lines that name the site profile, the file and the command that submits it."""
    site = f"site profile {profile}" if profile else f"no site profile: {PORTABLE}"
    return f"{site}\nwrote {file}\n  sbatch {shlex.quote(str(file))}"
