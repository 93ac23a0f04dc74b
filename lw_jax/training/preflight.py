"""Preflight checks of a configuration: errors for void runs, warnings for likely mistakes."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lw_jax.core import config, validation
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.data import row_sources
from lw_jax.training.recipe import Finding, Recipe

FEWEST_JUDGED = 100  # steps from which on a run is checked for collapse at its end, whatever train.alarm_step is
LONG_WARMUP = 0.5  # of a stage's steps


def inspect(cfg: Config, recipe: Recipe | None) -> list[Finding]:
    findings = [*_schedule(cfg), *_cadence(cfg), *_alarm(cfg)] if cfg.train.steps else []
    if recipe is not None:
        findings += recipe.findings()
    return sorted(findings, key=lambda finding: finding.severity)


def refuse(findings: Sequence[Finding]) -> None:
    if errors := [finding.text for finding in findings if finding.severity == "error"]:
        raise UserError("; ".join(errors))


def alarm_step(train: config.Train) -> int:
    """Returns the step from which on a collapse stops the run; 0: never.

    A run shorter than `train.alarm_step` is checked at its last step, a trial of a few steps not at all.
    """
    if train.alarm_step <= train.steps:
        return train.alarm_step
    return train.steps if train.steps >= FEWEST_JUDGED else 0


def is_validated(train: config.Train, step: int) -> bool:
    """Returns whether a step is validated, and saved whatever `train.checkpoint_every` is."""
    return step in (train.steps, alarm_step(train)) or bool(train.eval_every and step % train.eval_every == 0)


def save_interval(train: config.Train) -> int:
    """Returns the most steps between two checkpoints: a validated step is saved whatever `checkpoint_every` is."""
    return min(train.checkpoint_every, train.eval_every or train.steps, train.steps)


def _alarm(cfg: Config) -> list[Finding]:
    setting = f"train.alarm_step={cfg.train.alarm_step}"
    if cfg.recipe != "latentwire" or alarm_step(cfg.train):
        return []
    lost = f"it cannot fire: the run's {cfg.train.steps} steps are too few to judge" if cfg.train.alarm_step else "off"
    return [Finding("warning", f"{setting}: {lost}; a collapsed run is not stopped")]


def _schedule(cfg: Config) -> list[Finding]:
    shares = {"align": cfg.stages.align.share, "pretrain": cfg.stages.pretrain.share}
    shares["answer"] = 1.0 - sum(shares.values())
    trained = {name for name, _, _ in config.stages(cfg)}
    rule = f"train.steps={cfg.train.steps} gives no step to stage"
    remedy = "raise it, or change stages.*.share"
    findings = [
        Finding("error", f"{rule} {name}, {share:g} of the run; {remedy}")
        for name, share in shares.items()
        if share > 1e-9 and name not in trained
    ]
    warmup = cfg.optim.warmup_steps
    for name, stage, steps in config.stages(cfg):
        peak = cfg.optim.learning_rate * stage.rate
        where = "the run's" if steps == cfg.train.steps else f"stage {name}'s"
        setting = f"optim.warmup_steps={warmup}"
        if warmup > steps:
            reached = f"the rate reaches its peak of {peak:g} at the last of them, where the cosine should have ended"
            rule = f"is longer than {where} {steps} steps: {reached}; lower it, or train longer"
            findings.append(Finding("error", f"{setting} {rule}"))
        elif warmup > LONG_WARMUP * steps:
            rule = f"is {warmup / steps:.0%} of {where} {steps} steps: little is learned at the peak of {peak:g}"
            findings.append(Finding("warning", f"{setting} {rule}; a tenth is usual"))
        if steps < (lengths := len(stage.lengths)):
            problem = f"stages.{name}.lengths: {lengths} lengths in a stage of {steps} steps, not all are read"
            findings.append(Finding("warning", f"{problem}; name fewer, or train longer"))
    return findings


def _cadence(cfg: Config) -> list[Finding]:
    train, effects = cfg.train, {}
    if not 0 < alarm_step(train) < train.steps:
        effects["eval_every"] = "what is held out is measured at the end only, so that no best step is known"
    if save_interval(train) == train.steps:
        effects["checkpoint_every"] = "a run that is killed without notice starts anew"
    return [
        Finding("warning", f"train.{key}={value} is beyond the run's {train.steps} steps: {lost}")
        for key, lost in effects.items()
        if (value := getattr(train, key)) > train.steps
    ]


def missing_data(cfg: Config) -> list[str]:
    """Returns a line for each source of data that this machine cannot read; a queued run may start on another one."""
    generated, lines = ("", *validation.MADE, validation.DOCSTRINGS), []
    named = [
        (key, name)
        for key in ("train", "validation", "passages")
        for name in row_sources.split_sources(getattr(cfg.data, key))
    ]
    for key, source in named:
        if source.startswith(row_sources.HUB):
            if not importlib.util.find_spec("datasets"):
                lines.append(f"data.{key}={source!r}: the hub's data need a package: pip install datasets")
            continue
        if source in generated or row_sources.is_here(source):
            continue
        missing = f"data.{key}={source!r}: no such file or folder, seen from {Path.cwd()}"
        rule = f"a run needs it at its start: --config.data.{key}=FILE names one"
        lines.append(f"{missing}; {rule}")
    return lines
