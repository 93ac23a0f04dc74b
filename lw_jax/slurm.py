"""The verb `slurm`: a plan and a site profile -> an sbatch file that trains, saves before its limit and goes on.

`script` is pure text; only `main` touches files and starts `sbatch`.
"""

import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lw_jax import sources
from lw_jax.core.config import Config, suggest
from lw_jax.core.errors import UserError
from lw_jax.core.runtime import REQUEUE
from lw_jax.plan import SIZES, Plan, make, overrides, resolve_target

# Chosen, not measured: what a prediction may be wrong by, and what it leaves out.
TIME_MARGIN = 1.3
STARTUP_HOURS = 0.25  # reading weights and compiling, in every start
QUARTER = 15  # minutes
MEMORY_MARGIN = 1.25
PROCESS_GIB = 8  # Python, JAX, CUDA and its pinned buffers
SAVING_SECONDS = 120  # to write a checkpoint, beside the steps that are under way
MEMORY_FRACTION = 0.92  # of a card, for XLA; the rest is for CUDA, NCCL and cuBLAS
WRITER = "# Written by LatentWire JAX"

_WORD = re.compile(r"[\w.,:@/&|*()\[\]+=!-]*", re.ASCII)
_MODULE = re.compile(r"[\w./+:][\w./+:-]*", re.ASCII)
_GPUS = re.compile(r"--(gres=gpu:|gpus-per-node=)([\w.-]+:)?\{count\}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Site:
    """What one cluster wants; the field names are the keys of the TOML file, which may leave any out.

    Raises:
      UserError: a value could break out of its place in the script, or lies outside its range.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gpus: str = "--gpus-per-node={count}"  # or "--gres=gpu:h100:{count}"
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # shell lines run before training, as an environment's activation
    max_hours: float = math.inf
    cpus_per_gpu: int = 8
    scratch: str = ""  # a folder that every job and node sees; compiled programs are kept there
    file: dataclasses.InitVar[str] = "site profile"  # for messages only

    def __post_init__(self, file: str) -> None:
        for key in ("partition", "account", "qos", "constraint"):
            rule = "letters, digits and any of _.,:@/&|*()[]+=!- are allowed"
            _require(_WORD.fullmatch(getattr(self, key)), file, key, getattr(self, key), rule)
        rule = 'write --gpus-per-node={count} or --gres=gpu:{count}, with a type as in "--gres=gpu:h100:{count}"'
        _require(_GPUS.fullmatch(self.gpus), file, "gpus", self.gpus, rule)
        for module in self.modules:
            _require(_MODULE.fullmatch(module), file, "modules", module, "a module's name is needed, as cuda/12.4")
        for line in self.setup:
            _require(_is_shell_line(line), file, "setup", line, "one whole shell line is needed, every quote closed")
        _require(self.max_hours >= 0.5, file, "max_hours", self.max_hours, "at least 0.5 hours are needed")
        _require(1 <= self.cpus_per_gpu <= 256, file, "cpus_per_gpu", self.cpus_per_gpu, "1 to 256 are allowed")
        absolute = not self.scratch or (self.scratch.startswith("/") and self.scratch.isprintable())
        _require(absolute and "$" not in self.scratch, file, "scratch", self.scratch, "an absolute path is needed")


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
    memory_fraction: float  # of each card, for XLA
    origin: str  # one line: what plan the numbers come from


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
        planner: returns the plan of a target; None: `lw_jax.plan.make`.
        others: plans of other sizes to compare with; None: arithmetic estimates of 1, 2 and 4 cards.
    """
    site, profile = find_site(request.site)
    plan = (planner or make)(cfg, resolve_target(request.target, config=request.config))
    job = make_job(plan, resolved=resolved, workdir=workdir.absolute(), request=request, site=site)
    minutes, requeues = limit(job, site)
    file = Path(request.output).absolute() if request.output else workdir.absolute() / "job.sbatch"
    write(file, script(job, site), logs=job.logs)
    print(f"site profile {profile}" if profile else f"no site profile: {PORTABLE}")
    print(f"wrote {file}\n  sbatch {shlex.quote(str(file))}")
    again = f", {requeues + 1} runs of it (it requeues itself)" if requeues else ""
    print(f"{job.origin}\npredicted {job.hours:.2f} h, time limit {clock(minutes)}{again}")
    print("\n".join(compare([{**plan, "hours": job.hours}, *(_other_sizes(cfg, plan) if others is None else others)])))
    used = plan["chosen"]["devices_used"]
    if used < plan["devices"]:
        card = plan["target"].rpartition("x")[0]
        print(f"{used} of the {plan['devices']} GPUs do the work: --target {card}x{used} costs less")
    if request.submit:
        print(submit(file))


def find_site(named: str) -> tuple[Site, str]:
    """Returns the profile and its file: `named`, else $LW_JAX_SITE, else site.toml of ~/.config/lw_jax, else none."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "lw_jax" / "site.toml"
    file = named or os.environ.get("LW_JAX_SITE") or (str(home) if home.is_file() else "")
    return (read_site(Path(file).expanduser()), file) if file else (Site(), "")


def read_site(file: Path) -> Site:
    """Returns the profile of a TOML file; `~` and $VARIABLES in `scratch` are filled in.

    Raises:
      UserError: the file is missing or no TOML, a key is unknown, or a value is wrong.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{file}: {error}; a readable TOML file is needed, see docs/slurm.md.") from error
    defaults = {field.name: field.default for field in dataclasses.fields(Site)}
    for key, value in values.items():
        if key not in defaults:
            raise UserError(f"{file}: {key} is no known key.{suggest(key, defaults)} docs/slurm.md lists them all.")
        words, holds = _KINDS[type(defaults[key])]
        _require(holds(value), str(file), key, value, f"{words} is needed")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    if "scratch" in values:
        values["scratch"] = os.path.expandvars(os.path.expanduser(values["scratch"]))
    return Site(**values, file=str(file))


def make_job(plan: Plan, *, resolved: Mapping[str, Any], workdir: Path, request: Request, site: Site) -> Job:
    """Returns the job that runs a plan: its placement, micro-batch and remat become overrides of the command.

    Raises:
      UserError: nothing fits, or a number is unusable.
    """
    target, chosen = plan["target"], plan["chosen"]
    if not request.config:
        raise UserError("slurm needs --config FILE: the job starts training with it.")
    if chosen is None:
        raise UserError(
            f"--target {target}: no placement of this configuration fits, so there is no job to write. Take more or "
            f"larger cards, or shorter texts; python run.py plan --config {request.config} --target {target} tells why."
        )
    hours = plan["hours"] if request.hours is None else request.hours
    named = {"hours" if request.hours is None else "--hours": hours, "step_seconds": chosen["step_seconds"]}
    for name, value in (named | {"host_memory_bytes": plan["host_memory_bytes"]}).items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--target {target}: {name} = {value}: a number above 0 is needed; give --hours H.")
    python = "python" if site.setup else sys.executable  # setup lines activate an environment that has its own
    # All that is planned, for the file that the job reads again may set any of it.
    assignments = {**request.assignments, **overrides(chosen)}
    words = [f"--config.{path}={value}" for path, value in assignments.items()]
    start = (python, str(request.project / "run.py"), "train", "--config", request.config)
    made = "compiled" if plan["compiled"] else "estimated, not compiled"
    return Job(
        name=re.sub(r"[^\w.-]+", "-", workdir.name, flags=re.ASCII) or "latentwire",
        command=(*start, *words, "--workdir", str(workdir)),
        folder=Path.cwd(),  # so that relative paths mean what they meant to the user
        logs=workdir / "logs",
        nodes=plan["hosts"],
        gpus=plan["per_host"],
        host_memory_bytes=plan["host_memory_bytes"],
        hours=hours,
        step_seconds=chosen["step_seconds"],
        memory_fraction=max(MEMORY_FRACTION, resolved["mesh"]["target_utilisation"]),
        origin=f"plan {target} ({made}): {chosen['strategy']} {chosen['mesh']}, micro-batch {chosen['micro_batch']} x "
        f"{chosen['accumulation']} accumulated, remat {chosen['remat']}",
    )


def limit(job: Job, site: Site) -> tuple[int, int]:
    """Returns (time limit in minutes, times that the job must requeue itself to finish).

    Raises:
      UserError: the site's longest job is over before it could train.
    """
    needed, longest = job.hours * TIME_MARGIN + STARTUP_HOURS, site.max_hours
    if needed <= longest:
        return math.floor(min(QUARTER * math.ceil(needed * 60 / QUARTER), longest * 60)), 0
    useful = longest - STARTUP_HOURS - _notice_seconds(job) / 3600
    if useful <= 0:
        raise UserError(
            f"site profile: max_hours = {longest}: start-up ({STARTUP_HOURS} h) and the notice before the limit "
            f"({_notice_seconds(job)} s) leave no time to train; choose a partition with longer jobs."
        )
    return math.floor(longest * 60), math.ceil(job.hours * TIME_MARGIN / useful) - 1


def script(job: Job, site: Site) -> str:
    """Returns the text of the sbatch file.

    Raises:
      UserError: the path of the logs has a character that sbatch reads as its own.
    """
    start = f"{shlex.join(step(job, site))} \\\n    {shlex.join(job.command)} || code=$?"
    return "\n".join([*head(job, site), "code=0", start, *tail('"$SLURM_JOB_ID"')]) + "\n"


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
    # A task that leaves first, saved, must not have the others killed while they save; JAX ends those of a dead one.
    several = ["--label", "--kill-on-bad-exit=0"] if job.nodes > 1 else []
    return ["srun", f"--cpus-per-task={job.gpus * site.cpus_per_gpu}", *several]


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


def _other_sizes(cfg: Config, plan: Plan) -> list[Plan]:
    """Returns estimates of the same card in other numbers; none where the command line names the placement."""
    card = re.fullmatch(r"(?:\d+x)?([a-z]\w*?)x\d+", plan["target"])
    if card is None or cfg.mesh.placement != "auto":
        return []
    return [make(cfg, f"{card[1]}x{count}", estimate=True) for count in SIZES.values()]


def compare(plans: Sequence[Plan]) -> list[str]:
    """Returns a table of sizes and what each costs, a title first; the same target is told once, as it comes first."""
    rows = [["size", "GPUs", "hours", "GPU-hours", "plan"]]
    first = {plan["target"]: plan for plan in reversed(plans)}
    for target, plan in sorted(first.items(), key=lambda item: item[1]["devices"]):
        count, hours, chosen = plan["devices"], plan["hours"], plan["chosen"]
        how = "" if plan["compiled"] else " (estimate)"
        price = (
            [f"{hours:.2f}", f"{count * hours:.1f}", chosen["strategy"] + how] if chosen else ["-", "-", "does not fit"]
        )
        rows.append([target, str(count), *price])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


PORTABLE = "only what every SLURM knows is asked for; docs/slurm.md tells how to name partition and account."


def _directives(job: Job, site: Site, *, log: str) -> list[str]:
    minutes, requeues = limit(job, site)
    gib = job.host_memory_bytes / 2**30
    parts = f"{job.hours:.2f} h predicted x {TIME_MARGIN} + {STARTUP_HOURS} h to start"
    if requeues:
        parts += f" = more than max_hours {site.max_hours:g}: it requeues itself {requeues} times or so"
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
        f"# {parts}.",
        f"#SBATCH --time={clock(minutes)}",
        "# So long before the limit training (the step, not this shell) is asked to save and stop.",
        f"#SBATCH --signal=TERM@{_notice_seconds(job)}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f'#SBATCH --output="{logs.replace("%", "%%")}/{log}.log"',
    ]


def _notice_seconds(job: Job) -> int:
    """Returns whole minutes for the step that runs, the one already sent after it, and saving."""
    return 60 * math.ceil((SAVING_SECONDS + 2 * job.step_seconds) / 60)


def clock(minutes: int) -> str:
    """Returns a time limit as SLURM reads it."""
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00"


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


def _require(holds: object, file: str, key: str, value: Any, rule: str) -> None:
    if not holds:
        raise UserError(f"{file}: {key} = {value!r}: {rule}.")


def _is_shell_line(line: str) -> bool:
    try:
        return line.isprintable() and bool(shlex.split(line, comments=True)) and not line.endswith("\\")
    except ValueError:  # a quote without its end
        return False


_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str)),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a number", lambda value: type(value) in (int, float)),
    tuple: ("a list of strings", lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v)),
}
