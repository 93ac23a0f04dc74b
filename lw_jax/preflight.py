"""What is wrong with a run before it starts: each finding one line, an error where its result would be void."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from lw_jax.core import config, validation
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.data import documents

LONG_WARMUP = 0.5  # of a stage; beyond it most of the run is slower than it was meant to be


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to mend or to know."""

    void: bool  # the result would be worth nothing: the run is refused
    text: str

    def __str__(self) -> str:
        """Returns the line that people read."""
        return f"{'ERROR' if self.void else 'warning'}: {self.text}"


@runtime_checkable
class Inspected(Protocol):
    """A recipe that knows more of its own configurations than the trainer does."""

    def findings(self) -> list[Finding]:
        """Returns what is wrong and what mends it."""
        ...


def inspect(cfg: Config, recipe: object) -> list[Finding]:
    """Returns all that is found, errors first."""
    found = [*_schedule(cfg), *_cadence(cfg)]
    if isinstance(recipe, Inspected):
        found += recipe.findings()
    return sorted(found, key=lambda one: not one.void)


def refuse(found: Sequence[Finding]) -> None:
    """Raises UserError with every error."""
    if errors := [one.text for one in found if one.void]:
        raise UserError("; ".join(errors))


def _schedule(cfg: Config) -> list[Finding]:
    warmup, found = cfg.optim.warmup_steps, []
    for name, stage, steps in config.stages(cfg):
        peak = cfg.optim.learning_rate * stage.rate
        where = "the run's" if steps == cfg.train.steps else f"stage {name}'s"
        told = f"optim.warmup_steps={warmup}"
        if warmup > steps:
            reached = f"the rate reaches its peak of {peak:g} at the last of them, where the cosine should have ended"
            found.append(
                Finding(True, f"{told} is longer than {where} {steps} steps: {reached}; lower it, or train longer")
            )
        elif warmup > LONG_WARMUP * steps:
            share = f"{warmup / steps:.0%} of {where} {steps} steps"
            found.append(
                Finding(False, f"{told} is {share}: little is learned at the peak of {peak:g}; a tenth is usual")
            )
    return found


def _cadence(cfg: Config) -> list[Finding]:
    train, found = cfg.train, []
    for key, value, lost in (
        (
            "eval_every",
            train.eval_every,
            "what is held out is measured at the end only, so that no best step is known",
        ),
        ("checkpoint_every", train.checkpoint_every, "a run that is killed without notice starts anew"),
    ):
        if value > train.steps:
            found.append(Finding(False, f"train.{key}={value} is beyond the run's {train.steps} steps: {lost}"))
    return found


def missing_data(cfg: Config) -> list[Finding]:
    """Returns a warning for each data file that is not on this machine: the run may be started on another one."""
    made, found = (*validation.MADE, documents.DOCSTRINGS), []
    for key in ("train", "validation", "passages"):
        source = getattr(cfg.data, key)
        if not source or source in made or source.startswith("hub:") or Path(source).expanduser().exists():
            continue
        told = f"data.{key}={source!r}: no such file or folder, seen from {Path.cwd()}"
        found.append(
            Finding(False, f"{told}; the run ends at its start where it is missing: --config.data.{key}=FILE names one")
        )
    return found
