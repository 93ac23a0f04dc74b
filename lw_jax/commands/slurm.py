"""The verb `slurm`: a plan and a site profile -> an sbatch file that trains, saves before its limit and goes on.

`script` is pure text; only `main` touches files and starts `sbatch`.
"""

import dataclasses
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.runtime import REQUEUE
from lw_jax.hub import sources
from lw_jax.planning import remedies
from lw_jax.planning.planner import SIZES, Plan, inspect, kept, make, overrides, resolve_target
from lw_jax.slurm import cluster_profile, past_runs
from lw_jax.slurm.cluster_profile import PORTABLE, Limit, Site, clock, find_site
from lw_jax.slurm.past_runs import Record
from lw_jax.training import preflight

# Chosen, not measured.
MEMORY_MARGIN = 1.25
PROCESS_GIB = 8  # Python, JAX, CUDA and its pinned buffers
MEMORY_FRACTION = 0.92  # of a card, for XLA; the rest is for CUDA, NCCL and cuBLAS
WRITER = "# Written by LatentWire JAX"
RESTARTS = 10  # of a job from which on a killed task is no longer taken for bad luck


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run on so many GPUs of so many nodes."""

    name: str
    command: tuple[str, ...]  # the words of the training command
    folder: Path  # where the command is run
    logs: Path
    nodes: int
    gpus: int  # of one node
    host_memory_bytes: int  # of one node
    hours: float
    step_seconds: float
    checkpoint_seconds: float  # between two checkpoints
    memory_fraction: float  # of each card, for XLA
    origin: str  # one line: what plan the numbers come from
    basis: str = "predicted"  # one line: where the hours come from


@dataclasses.dataclass(frozen=True)
class Request:
    """The words of the command line that ask for a job."""

    config: str  # FILE[:recipe]
    assignments: Mapping[str, str]  # path -> value of --config.path=value
    project: Path  # where run.py lies
    target: str = ""  # h100x4 | single | dual | quad; empty: the name of the configuration file
    site: str = ""
    submit: bool = False
    output: str = ""
    hours: float | None = None  # instead of the predicted ones
    measured: Path | None = None  # an earlier run's folder; of a list, what holds one for each task


def main(
    cfg: Config,
    *,
    resolved: Mapping[str, Any],
    workdir: Path,
    request: Request,
    planner: Callable[[Config, str], Plan] | None = None,
    others: Sequence[Plan] | None = None,
) -> None:
    """Writes the sbatch file of a planned training run, tells its price, and submits it when asked to.

    Args:
        planner: returns the plan of a target; None: `lw_jax.planning.planner.make`.
        others: plans of other sizes to compare with; None: those of 1, 2 and 4 cards.

    Raises:
        UserError: the run's result would be void, nothing fits, or a number is unusable.
    """
    site, profile = find_site(request.site)
    warnings = check({"": cfg}, submit=request.submit)
    plan = (planner or make)(cfg, resolve_target(request.target, config=request.config))
    record = past_runs.read(request.measured, cfg, plan) if request.measured else None
    job = make_job(plan, resolved=resolved, workdir=workdir.absolute(), request=request, site=site, record=record)
    file = Path(request.output).absolute() if request.output else workdir.absolute() / "job.sbatch"
    write(file, script(job, site), logs=job.logs)
    print(f"{written(file, profile)}\n{job.origin}\n{describe_limit(job, site)}")
    told = [*(record.describe_differences() if record else ()), *warnings]
    print("".join(f"{line}\n" for line in told), end="")
    print("\n".join(compare([plan, *(other_sizes(cfg, plan) if others is None else others)], hours=job.hours)))
    used = plan["chosen"]["devices_used"]
    if used < plan["devices"]:
        card = plan["target"].rpartition("x")[0]
        print(f"{used} of the {plan['devices']} GPUs do the work: --target {card}x{used} costs less")
    if request.submit:
        print(submit(file))


def check(runs: Mapping[str, Config], *, submit: bool) -> list[str]:
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
            (errors if one.void else warnings).append(f"{where}{one.text}")
        absent = [f"{where}{one.text}" for one in preflight.missing_data(cfg)]
        (errors if submit else warnings).extend(absent)
    if errors:
        raise UserError(f"no job was written: {'; '.join(errors)}")
    return [f"warning: {line}" for line in warnings]


def make_job(
    plan: Plan,
    *,
    resolved: Mapping[str, Any],
    workdir: Path,
    request: Request,
    site: Site,
    record: Record | None = None,
) -> Job:
    """Returns the job that runs a plan: its placement, micro-batch and remat become overrides of the command.

    Raises:
      UserError: nothing fits, or a number is unusable.
    """
    target, chosen, train = plan["target"], plan["chosen"], resolved["train"]
    if not request.config:
        raise UserError("slurm needs --config FILE: the job starts training with it.")
    if chosen is None:
        raise UserError(nothing_fits(plan, request.config))
    hours, basis = _time(plan, steps=train["steps"], given=request.hours, record=record)
    memory = plan["host_memory_bytes"]
    if not (math.isfinite(memory) and memory > 0):
        raise UserError(f"--target {target}: host_memory_bytes = {memory}: a number above 0 is needed; plan it anew.")
    python = "python" if site.setup else sys.executable  # setup lines activate an environment that has its own
    # All that is planned, for the file that the job reads again may set any of it.
    assignments = {**request.assignments, **overrides(chosen)}
    words = [f"--config.{path}={value}" for path, value in assignments.items()]
    start = (python, str(request.project / "run.py"), "train", "--config", request.config)
    step_seconds = hours * 3600 / train["steps"]
    return Job(
        name=re.sub(r"[^\w.-]+", "-", workdir.name, flags=re.ASCII) or "latentwire",
        command=(*start, *words, "--workdir", str(workdir)),
        folder=Path.cwd(),  # so that relative paths mean what they meant to the user
        logs=workdir / "logs",
        nodes=plan["hosts"],
        gpus=plan["per_host"],
        host_memory_bytes=memory,
        hours=hours,
        step_seconds=step_seconds,
        checkpoint_seconds=step_seconds * min(train["checkpoint_every"], train["steps"]),
        memory_fraction=max(MEMORY_FRACTION, resolved["mesh"]["target_utilisation"]),
        origin=_origin(plan, record),
        basis=basis,
    )


def _time(plan: Plan, *, steps: int, given: float | None, record: Record | None) -> tuple[float, str]:
    """Returns the hours of all steps and where they come from: the user, else a measurement, else the plan."""
    if given is not None and record is not None:
        raise UserError(f"--hours {given:g} and --measured {record.workdir}: each replaces the plan's time; leave one.")
    hours, basis = plan["hours"], "predicted"
    if given is not None:
        hours, basis = given, "given by --hours"
    elif record is not None:
        hours, basis = record.step_seconds * steps / 3600, record.describe()
    if not (math.isfinite(hours) and hours > 0):
        name = "hours" if given is None else "--hours"
        rule = "a number above 0 is needed; give --hours H or --measured DIR."
        raise UserError(f"--target {plan['target']}: {name} = {hours}: {rule}")
    return hours, basis


def _origin(plan: Plan, record: Record | None) -> str:
    chosen, made = plan["chosen"], "compiled" if plan["compiled"] else "estimated, not compiled"
    told = (
        f"plan {plan['target']} ({made}): {chosen['strategy']} {chosen['mesh']}, micro-batch {chosen['micro_batch']} x "
        f"{chosen['accumulation']} accumulated, remat {chosen['remat']}"
    )
    return f"{told}; {record.describe_memory(chosen['peak_bytes'])}" if record else told


def nothing_fits(plan: Plan, config: str) -> str:
    """Returns the refusal of a job for which the plan has no placement."""
    target, more = plan["target"], "".join(f"; {line}" for line in remedies.describe(plan["remedies"]))
    return (
        f"--target {target}: no placement of this configuration fits, so there is no job to write. Take more or "
        f"larger cards, or shorter texts; python run.py plan --config {config} --target {target} tells why{more}."
    )


def limit(job: Job, site: Site) -> Limit:
    """Returns the job's time limit; see `cluster.limit`."""
    return cluster_profile.limit(
        job.hours,
        step_seconds=job.step_seconds,
        checkpoint_seconds=job.checkpoint_seconds,
        basis=job.basis,
        site=site,
    )


def describe_limit(job: Job, site: Site) -> str:
    """Returns the line for people that tells the time limit, how it was found and how often the job is requeued."""
    found = limit(job, site)
    return f"time limit {clock(found.minutes)}: {found.told}"


def written(file: Path, profile: str) -> str:
    """Returns the lines for people that name the site profile, the file and what submits it."""
    site = f"site profile {profile}" if profile else f"no site profile: {PORTABLE}"
    return f"{site}\nwrote {file}\n  sbatch {shlex.quote(str(file))}"


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


def other_sizes(cfg: Config, plan: Plan) -> list[Plan]:
    """Returns plans of the same card in other numbers, of one basis with the job's own where that is to be had.

    Compiled plans that are kept on disk are taken, none is compiled for this. Where one is not kept, all sizes are
    estimated, the job's own too (see `compare`). Nothing where the command line names the placement.
    """
    card = re.fullmatch(r"(?:\d+x)?([a-z]\w*?)x\d+", plan["target"])
    if card is None or cfg.mesh.placement != "auto":
        return []
    targets = [target for count in SIZES.values() if (target := f"{card[1]}x{count}") != plan["target"]]
    compiled = [found for target in targets if plan["compiled"] and (found := kept(cfg, target))]
    if plan["compiled"] and len(compiled) == len(targets):
        return compiled
    own = [plan["target"]] if plan["compiled"] else []
    return [*compiled, *(make(cfg, target, estimate=True) for target in (*targets, *own))]


def compare(plans: Sequence[Plan], *, hours: float | None) -> list[str]:
    """Returns a table of sizes and what each costs, a title first; like stands beside like.

    Args:
        plans: the job's own first; several of one target where one is compiled and one is estimated.
        hours: of the job, in place of its plan's (given or measured); the other sizes are scaled alike.

    Compiled and estimated hours differ by up to a half, so that they never share a column: where some size is only
    estimated, every size has its estimate in columns of their own.
    """
    own, factor = plans[0], 1.0
    if hours and own["hours"] and math.isfinite(own["hours"]):
        factor = hours / own["hours"]
    elif hours:
        plans = [{**own, "hours": hours}, *plans[1:]]
    bases = [{one["target"]: one for one in reversed(plans) if one["compiled"] is basis} for basis in (True, False)]
    mixed = all(bases)
    columns = ["hours", "GPU-hours"] + (["est. hours", "est. GPU-hours"] if mixed else [])
    rows = [["size", "GPUs", *columns, "plan"]]
    sizes = {one["target"]: one["devices"] for one in plans}
    for target, count in sorted(sizes.items(), key=lambda item: item[1]):
        found = [basis.get(target) for basis in bases if basis]
        best = next(one for one in found if one)
        how = "" if best["compiled"] else " (estimate)"
        price = [cell for one in found for cell in _price(one, count, factor)]
        rows.append(
            [target, str(count), *price, best["chosen"]["strategy"] + how if best["chosen"] else "does not fit"]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    scaled = len(sizes) > 1 and abs(factor - 1) > 0.005
    notes = [f"every size x {factor:.2f}: the job's hours over the predicted ones"] if scaled else []
    if mixed:
        notes.append(
            "est.: arithmetic, of all sizes alike; once `plan --simulate 1,2,4` has compiled them, they stand here"
        )
    return [*table, *notes]


def _price(plan: Plan | None, count: int, factor: float) -> list[str]:
    """Returns hours and GPU-hours."""
    if plan is None or not plan["chosen"] or plan["hours"] is None:
        return ["-", "-"]
    hours = plan["hours"] * factor
    return [f"{hours:.2f}", f"{count * hours:.1f}"]


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
