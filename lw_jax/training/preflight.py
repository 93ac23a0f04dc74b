"""What is wrong with a run before it starts: each finding one line, an error where its result would be void."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from lw_jax.core import config, validation
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.data import documents

FEWEST_JUDGED = 100  # steps of a run whose latents must be worth something at its end, whatever train.alarm_step says
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


@runtime_checkable
class Alarmed(Protocol):
    """A recipe that can tell from a validation that a run is worth nothing (`recipes.base.Watched`)."""

    def collapse(self, step: int, values: Mapping[str, float]) -> str:
        """Returns what is wrong and by how much, or nothing."""
        ...


def inspect(cfg: Config, recipe: object) -> list[Finding]:
    """Returns all that is found, errors first."""
    found = [*_schedule(cfg), *_cadence(cfg), *_alarm(cfg, recipe)]
    if isinstance(recipe, Inspected):
        found += recipe.findings()
    return sorted(found, key=lambda one: not one.void)


def refuse(found: Sequence[Finding]) -> None:
    """Raises UserError with every error."""
    if errors := [one.text for one in found if one.void]:
        raise UserError("; ".join(errors))


def alarm_step(train: config.Train) -> int:
    """Returns the step from which on a collapse stops the run; 0: never.

    Of a run that is shorter than `train.alarm_step` it is the last one; one of a few steps is a trial, and not judged.
    """
    if train.alarm_step <= train.steps:
        return train.alarm_step
    return train.steps if train.steps >= FEWEST_JUDGED else 0


def _alarm(cfg: Config, recipe: object) -> list[Finding]:
    told = f"train.alarm_step={cfg.train.alarm_step}"
    if recipe is None:  # asked before it is made
        return []
    if not isinstance(recipe, Alarmed):
        lost = f"recipe {cfg.recipe!r} has no such alarm, it cannot fire; 0 says so"
        return [Finding(False, f"{told}: {lost}")] if cfg.train.alarm_step else []
    if alarm_step(cfg.train):
        return []
    lost = f"it cannot fire: the run's {cfg.train.steps} steps are too few to judge" if cfg.train.alarm_step else "off"
    return [Finding(False, f"{told}: {lost}; a run whose latents are worth nothing is not stopped")]


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
