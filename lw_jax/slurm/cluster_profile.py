"""Cluster profile, a small TOML file, and time limits under its longest job."""

import dataclasses
import math
import os
import shlex
import tomllib
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from lw_jax.core import schema
from lw_jax.core.config import Train
from lw_jax.core.errors import UserError
from lw_jax.core.files import expand
from lw_jax.planning.plans import Plan
from lw_jax.training import preflight
from lw_jax.training.preflight import Finding

# Chosen, not measured: error of a prediction, and time outside of it.
TIME_MARGIN = 1.3
STARTUP_HOURS = 0.25  # reading weights and compiling, in every start
QUARTER = 15  # minutes
SAVING_SECONDS = 120  # to write a checkpoint, beside the steps that are under way
UNCOUNTED = "without validations"  # in a basis, where their number of examples or their time is not known
UNTIMED = f"{UNCOUNTED}: the plan has no time of theirs"
ALL_HELD_OUT = f"{UNCOUNTED}: data.validation_limit and eval.examples are 0"
PORTABLE = "only portable options are used; docs/slurm.md shows how to set partition and account."

# What could leave its line of the script is refused.
_Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.,:@/&|*()\[\]+=!-]*\Z")]
_Gpus = Annotated[str, Meta(pattern=r"^--(gres=gpu:|gpus-per-node=)([A-Za-z0-9_.-]+:)?\{count\}\Z")]
_Module = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./+:][A-Za-z0-9_./+:-]*\Z")]


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one cluster; the fields are the keys of the TOML file, all optional."""

    partition: _Word = ""
    account: _Word = ""
    qos: _Word = ""
    constraint: _Word = ""
    gpus: _Gpus = "--gpus-per-node={count}"  # or "--gres=gpu:h100:{count}"
    modules: tuple[_Module, ...] = ()
    setup: tuple[str, ...] = ()  # shell lines run before training, as an environment's activation
    max_hours: Annotated[float, Meta(ge=0.5)] = math.inf
    cpus_per_gpu: Annotated[int, Meta(ge=1, le=256)] = 8
    # An absolute folder that every job sees, for compiled programs.
    scratch: Annotated[str, Meta(pattern=r"^(/[^$\x00-\x1f\x7f]*)?\Z")] = ""

    def __post_init__(self) -> None:
        if wrong := [line for line in self.setup if not _is_shell_line(line)]:
            raise UserError(f"setup = {wrong[0]!r}: one whole shell line is needed, every quote closed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Duration:
    """How long a run takes."""

    hours: float
    step_seconds: float  # 0: a run without steps, of which nothing is saved before its end
    checkpoint_seconds: float  # between two checkpoints
    start_hours: float = 0.0  # of `hours`, before the first step: kept by the first checkpoint
    basis: str = "predicted"  # one line: the source of the hours


class Limit(NamedTuple):
    """Time limit of a job, and the number of requeues of a longer run."""

    minutes: int
    requeues: int
    description: str  # one line: derivation, and requeues where the limit is shorter than the run


def find_site(named: str) -> tuple[Site, str]:
    """Returns the profile and its file: `named`, else $LW_JAX_SITE, else site.toml of ~/.config/lw_jax, else none."""
    home = expand(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "lw_jax" / "site.toml"
    file = named or os.environ.get("LW_JAX_SITE") or (str(home) if home.is_file() else "")
    return (read_site(expand(file)), file) if file else (Site(), "")


def read_site(file: Path) -> Site:
    """Returns the profile of a TOML file; `~` and $VARIABLES in `scratch` are filled in.

    Raises:
      UserError: the file is missing or no TOML, a key is unknown, or a value is wrong.
    """
    try:
        values = tomllib.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{file}: {error}; a readable TOML file is needed, see docs/slurm.md.") from error
    if isinstance(scratch := values.get("scratch"), str):
        values["scratch"] = os.path.expandvars(os.path.expanduser(scratch))
    return schema.convert(values, Site, where=str(file), remedy="docs/slurm.md lists every key")


def limit(run: Duration, site: Site) -> Limit:
    """Returns the time limit of a run.

    Raises:
      UserError: the site's longest job leaves no time to train, or none for a first checkpoint.
    """
    needed, longest = run.hours * TIME_MARGIN + STARTUP_HOURS, site.max_hours
    text = f"{run.hours:.2f} h {run.basis}, x {TIME_MARGIN} + {STARTUP_HOURS} h to start"
    if needed <= longest:
        return Limit(math.floor(min(QUARTER * math.ceil(needed * 60 / QUARTER), longest * 60)), 0, text)
    where, remedy = f"site profile: max_hours = {longest:g}", "choose a partition with longer jobs"
    if not run.step_seconds:
        raise UserError(f"{where}: {text} = {needed:.2f} h, of which nothing is saved before the end; {remedy}.")
    notice, between = notice_seconds(run.step_seconds), f"{run.checkpoint_seconds / 60:.1f} min"
    start_hours, useful = run.start_hours * TIME_MARGIN, (longest - STARTUP_HOURS) * 3600 - notice
    startup, first = STARTUP_HOURS + start_hours, useful - start_hours * 3600
    if first <= 0:
        raise UserError(
            f"{where}: start-up ({startup:.2f} h) and the notice before the limit ({notice} s) leave no time to "
            f"train; {remedy}."
        )
    if first < run.checkpoint_seconds:
        possible = math.floor(first / run.step_seconds)
        remedy = f"set --config.train.checkpoint_every to {possible} at most, or {remedy}" if possible else remedy
        raise UserError(
            f"{where}: start-up ({startup:.2f} h), the notice before the limit ({notice} s) and one checkpoint "
            f"interval ({between}) are longer, and the run takes {needed:.2f} h: killed "
            f"without notice it would start over each time; {remedy}."
        )
    requeues = math.ceil(run.hours * 3600 * TIME_MARGIN / useful) - 1
    text += (
        f" = {needed:.2f} h, more than max_hours {longest:g}: it requeues itself {requeues} times or so, "
        f"with a checkpoint every {between}"
    )
    return Limit(math.floor(longest * 60), requeues, text)


def pace(hours: float, train: Train) -> tuple[float, float]:
    """Returns the seconds of a step and those between two checkpoints; 0 for a run without steps."""
    step = hours * 3600 / train.steps if train.steps else 0.0
    return step, step * max(1, preflight.save_interval(train))


def hours_of_run(hours: float, basis: str, plan: Plan, train: Train, done: int = 0) -> tuple[float, float, str]:
    """Returns hours with those of validations (in proportion) and of the start, the start's, and what the basis says.

    Of a run that resumes behind `done` steps it is what is left.
    """
    if plan.hours and plan.validation_hours is not None:
        hours, basis = hours + hours * plan.validation_hours / plan.hours, f"{basis}, validations included"
    elif train.steps:  # the last one is validated, whatever train.eval_every is
        basis = f"{basis}, {ALL_HELD_OUT if plan.hours else UNTIMED}"
    if not (done and train.steps):
        start = plan.start_hours or 0.0
        return hours + start, start, basis
    left = max(train.steps - done, 0)
    return hours * left / train.steps, 0.0, f"{basis}, {left:,} of {train.steps:,} steps left"


def inspect(plan: Plan, train: Train) -> list[Finding]:
    site, profile = find_site("")
    if plan.hours is None:
        return []
    step, between = pace(plan.hours, train)
    hours, start, basis = hours_of_run(plan.hours, "predicted", plan, train)
    run = Duration(hours=hours, step_seconds=step, checkpoint_seconds=between, start_hours=start, basis=basis)
    try:
        time_limit = limit(run, site)
    except UserError as error:
        return [Finding("error", f"{profile}: {error}")]
    return [Finding("warning", f"{profile}: {time_limit.description}")] if time_limit.requeues else []


def notice_seconds(step_seconds: float) -> int:
    """Returns seconds, in whole minutes, for the running step, the next one already dispatched, and saving."""
    return 60 * math.ceil((SAVING_SECONDS + 2 * step_seconds) / 60)


def clock(minutes: int) -> str:
    days, remainder = divmod(minutes, 24 * 60)
    return f"{days}-{remainder // 60:02}:{remainder % 60:02}:00"


def _is_shell_line(line: str) -> bool:
    try:
        return line.isprintable() and bool(shlex.split(line, comments=True)) and not line.endswith("\\")
    except ValueError:  # a quote without its end
        return False
