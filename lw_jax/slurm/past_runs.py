"""Measured seconds a step and memory of an earlier run, from the records in its folder."""

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lw_jax.core import config
from lw_jax.core.config import Config, diff, meaning, shape
from lw_jax.core.errors import UserError
from lw_jax.core.files import expand
from lw_jax.planning import gpus
from lw_jax.planning.plans import Candidate, Plan
from lw_jax.training import hardware_record, metrics
from lw_jax.training.hardware_record import HardwareRecord
from lw_jax.training.run_folder import read_config, read_devices, read_metrics

NAMED = 3  # differing values in a line
# What decides the time of a step, beside where and how it runs.
_SIZES = re.compile(
    r"recipe|(llms|encoder|adapter|ttt|lora)\..*|train\.global_batch|data\.packed_tokens|dpo\.(max_length|reference)"
)


@dataclasses.dataclass(frozen=True)
class Record:
    """One run's measurements."""

    workdir: Path
    hardware: HardwareRecord
    step_seconds: float  # mean of the job's steps, of each stage the median of the logged laps
    peak_bytes: float | None  # of the fullest device; None where the runtime reported none
    differences: tuple[str, ...]  # from the job's configuration

    def describe(self) -> str:
        hardware = self.hardware
        return f"measured in {self.workdir} on {hardware.devices} x {hardware.kind}: {self.step_seconds:.4g} s/step"

    def describe_memory(self, planned: float) -> str:
        peak = f"{self.peak_bytes / 1e9:.1f} GB measured at most" if self.peak_bytes else "no peak in the record"
        return f"memory of a card: {peak}, {planned / 1e9:.1f} GB planned"

    def describe_differences(self) -> list[str]:
        if not self.differences:
            return []
        more = f" (and {len(self.differences) - NAMED} more)" if len(self.differences) > NAMED else ""
        return [f"measured with other values than the job's: {'; '.join(self.differences[:NAMED])}{more}"]


def read(workdir: Path, cfg: Config, plan: Plan) -> Record:
    """Returns the measurements in a run's folder, for the job of a plan.

    Raises:
      UserError: no usable measurement, or another recipe, batch, model or machine.
    """
    if not cfg.train.steps:
        raise UserError(f"--measured {workdir}: config.train.steps = 0 has no step to take from it; give --hours H")
    workdir = expand(workdir).absolute()
    old = read_config(workdir)
    _check_run(workdir, old, cfg)
    hardware = hardware_record.read(workdir)
    _check_machine(workdir, hardware, plan)
    log = workdir / "metrics.jsonl"
    rows = [row for row in read_metrics(log) if row["step"] > hardware.since_step] if log.exists() else []
    seconds = _seconds_by_stage(rows, old, since=hardware.since_step)
    stages = {name: steps for name, _, steps in config.stages(cfg)}
    if missing := [name for name in stages if not seconds.get(name)]:
        rule = f"they are logged every train.log_every = {old.train.log_every} steps: let that run train longer"
        what = f"no seconds a step of stage {missing[0]!r} in {log.name}"
        raise UserError(f"--measured {workdir}: {what}; {rule}, or leave the flag out.")
    devices = read_devices(workdir)
    peaks = [row["peak_bytes"] for row in devices if row.get("time", 0) >= hardware.since_time and "peak_bytes" in row]
    changes = [line for line in diff(meaning(old), meaning(cfg)) if not line.startswith("train.steps:")]
    sizes = shape(cfg).keys()
    changes.sort(key=lambda line: line.partition(":")[0] not in sizes)  # what a step's time may depend on first
    return Record(
        workdir=workdir,
        hardware=hardware,
        step_seconds=sum(steps * statistics.median(seconds[name]) for name, steps in stages.items()) / cfg.train.steps,
        peak_bytes=max(peaks, default=None),
        differences=(*_placed_otherwise(hardware, plan.chosen), *changes),
    )


def _seconds_by_stage(rows: Sequence[Mapping[str, Any]], cfg: Config, *, since: int) -> dict[str, list[float]]:
    """Returns the logged laps of each stage of a run: a step of passages takes other seconds than one of questions.

    A lap over the end of a stage is of both: a short one may have no other. `since`: the step behind which rows begin.
    """
    rows = [row for row in rows if not metrics.validates(row)]
    laps = list(zip([since, *(row["step"] for row in rows)], rows, strict=False))
    seconds, last = {}, 0
    for name, _, steps in config.stages(cfg):
        first, last = last, last + steps
        own = [row.get("train/seconds_per_step") for before, row in laps if before < last and first < row["step"]]
        seconds[name] = [lap for lap in own if isinstance(lap, (int, float)) and math.isfinite(lap) and lap > 0]
    return seconds


def _check_run(workdir: Path, old: Config, cfg: Config) -> None:
    rule = "only a run of the same steps measures their time; train a few steps of this configuration first."
    mine, theirs = shape(cfg), shape(old)
    for path in filter(_SIZES.fullmatch, dict.fromkeys([*mine, *theirs])):
        if mine.get(path) != theirs.get(path):
            raise UserError(
                f"--measured {workdir}: {path} is {theirs.get(path)!r} there, {mine.get(path)!r} here; {rule}"
            )


def _check_machine(workdir: Path, hardware: HardwareRecord, plan: Plan) -> None:
    chosen = plan.chosen
    if chosen is None:
        return  # nothing fits: `make_job` refuses it
    card = gpus.parse(plan.target).card
    if (hardware.card, hardware.devices, hardware.hosts) == (card.name, chosen.devices_used, plan.hosts):
        return
    theirs = f"{hardware.devices} x {hardware.card or hardware.kind} of {hardware.hosts} node(s)"
    mine = f"{chosen.devices_used} x {card.name} of {plan.hosts} node(s)"
    nodes = f"{hardware.hosts}x" if hardware.hosts > 1 else ""
    remedy = "measure there, or leave the flag out"
    if hardware.card:
        remedy = f"name --target {nodes}{hardware.card}x{hardware.devices // hardware.hosts}, or {remedy}"
    raise UserError(f"--measured {workdir}: measured on {theirs}, --target {plan.target} uses {mine}; {remedy}.")


def _placed_otherwise(hardware: HardwareRecord, chosen: Candidate | None) -> list[str]:
    planned = chosen.overrides() if chosen else {}
    pairs = (
        ("placement", hardware.strategy, "mesh.placement"),
        ("data axis", hardware.data, "mesh.data"),
        ("micro-batch", hardware.micro_batch, "train.micro_batch"),
        ("remat", hardware.remat, "compute.remat"),
    )
    compared = [(name, old, planned.get(key, old)) for name, old, key in pairs]
    return [f"{name}: {old} -> {new}" for name, old, new in compared if new not in (old, -1)]
