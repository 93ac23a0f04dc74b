"""The command `slurm`: writes the sbatch file of a planned training run, or of a list of them."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lw_jax.commands.loading import PROJECT, Loaded, list_workdir
from lw_jax.commands.parser import is_list
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.planning import planner
from lw_jax.planning.plans import Plan
from lw_jax.slurm import job_script, past_runs, size_comparison
from lw_jax.slurm.cluster_profile import PORTABLE, Site, find_site
from lw_jax.slurm.job import Job, Request, describe_limit, make_job
from lw_jax.slurm.past_runs import Record
from lw_jax.training import preflight, run_folder
from sharding.errors import PlacementError


def run(args: argparse.Namespace, *loaded: Loaded) -> None:
    """Writes the sbatch file of a planned run, or of the several of a list, and submits it when asked to.

    Raises:
        UserError: a run's result would be void, nothing fits, or a number is unusable.
    """
    if is_list(args):
        _write_list(args, loaded)
    else:
        _write_one(args, *loaded)


def _write_one(args: argparse.Namespace, loaded: Loaded) -> None:
    site, profile = find_site(args.site or "")
    warnings = _check({"": loaded.cfg}, submit=args.submit)
    plan, record, job = _plan_job(loaded, Path(args.measured) if args.measured else None, args=args, site=site)
    file = Path(args.output).absolute() if args.output else loaded.workdir.absolute() / "job.sbatch"
    job_script.write(file, job_script.script(job, site), logs=job.logs)
    print(f"{_describe_file(file, profile)}\n{job.origin}\n{describe_limit(job, site)}")
    notes = [*(record.describe_differences() if record else ()), *warnings]
    print("".join(f"{line}\n" for line in notes), end="")
    try:
        others = size_comparison.other_sizes(loaded.cfg, plan)
    except UserError as error:  # the job is written: a table alone may be missing
        print(f"other sizes are not compared: {error}")
        others = []
    print("\n".join(size_comparison.compare([plan, *others], hours=job.hours)))
    used = plan.chosen.devices_used if plan.chosen else plan.devices
    if used < plan.devices:
        card = plan.target.rpartition("x")[0]
        print(f"{used} of the {plan.devices} GPUs do the work: --target {card}x{used} costs less")
    if args.submit:
        print(job_script.submit(file))


def _write_list(args: argparse.Namespace, tasks: Sequence[Loaded]) -> None:
    kind, workdir = args.jobs or "array", list_workdir(args)
    site, profile = find_site(args.site or "")
    jobs, notes = [], _check({task.workdir.name: task.cfg for task in tasks}, submit=args.submit)
    for task in tasks:
        name = task.workdir.name
        measured = Path(args.measured) / name if args.measured else None
        try:
            _, record, job = _plan_job(task, measured, args=args, site=site)
        except PlacementError as error:
            raise UserError(f"no job was written: {name}: {error}") from error
        jobs.append(job)
        notes += [f"{name}: {line}" for line in (record.describe_differences() if record else ())]
    whole = job_script.join(jobs, kind, name=Path(args.config).stem, logs=workdir.absolute() / "logs")
    file = Path(args.output).absolute() if args.output else workdir.absolute() / f"{kind}.sbatch"
    job_script.write(file, job_script.list_script(jobs, whole, site, kind), logs=whole.logs)
    print(_describe_file(file, profile))
    for job in jobs:
        memory = job.host_memory_bytes / 2**30
        print(f"  {job.name}: {job.hours:.2f} h {job.basis}, {memory:.0f} GiB of host memory; {job.origin}")
    each = "each task" if kind == "array" else f"all {len(jobs)} together"
    print("".join(f"{line}\n" for line in notes) + f"of {each}: {describe_limit(whole, site)}")
    if args.submit:
        print(job_script.submit(file))


def _plan_job(
    task: Loaded, measured: Path | None, *, args: argparse.Namespace, site: Site
) -> tuple[Plan, Record | None, Job]:
    run_folder.check_run(task.cfg, task.workdir)  # or the job would wait in the queue to be refused
    plan = planner.plan_run(task.cfg, planner.resolve_target(args.target or "", config=task.spec))
    record = past_runs.read(measured, task.cfg, plan) if measured else None
    script = PROJECT / "run.py"
    program = (str(script),) if script.is_file() else ("-m", "lw_jax.commands.program")
    request = Request(config=task.spec, assignments=args.assignments, program=program, hours=args.hours)
    folder = task.workdir.absolute()
    return plan, record, make_job(plan, task.cfg, workdir=folder, request=request, site=site, record=record)


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
        for finding in planner.inspect(cfg):
            (errors if finding.severity == "error" else warnings).append(f"{where}{finding.text}")
        absent = [f"{where}{line}" for line in preflight.missing_data(cfg)]
        (errors if submit else warnings).extend(absent)
    if errors:
        raise UserError(f"no job was written: {'; '.join(errors)}")
    return [f"warning: {line}" for line in warnings]


def _describe_file(file: Path, profile: str) -> str:
    site = f"site profile {profile}" if profile else f"no site profile: {PORTABLE}"
    return f"{site}\nwrote {file}\n  sbatch {shlex.quote(str(file))}"
