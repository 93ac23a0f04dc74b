"""Tables of plans for people."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lw_jax.planning import estimate as estimates
from lw_jax.planning import start_tables
from lw_jax.planning.plans import Plan, StepCandidate, StepPlan
from lw_jax.planning.start_plan import StartPlan
from lw_jax.training.memory import bytes_of
from sharding import place
from sharding.place import Cut

LEGEND = "GB (1e9 bytes) a device; est.: arithmetic estimate and its distance from the compiled figure; times predicted"


def report(plan: Plan, *, own: Mapping[str, Any] | None = None) -> str:
    """Returns a plan as text; `own` are the values of `config.SEARCHED` that the configuration's file sets."""
    if isinstance(plan, StartPlan):
        work, notes, legend = start_tables.describe(plan), [], start_tables.LEGEND
        rows, choice = start_tables.rows(plan.candidates), plan.chosen and start_tables.choice(plan, plan.chosen)
    else:
        assert isinstance(plan, StepPlan), "there are two kinds"
        work, notes, legend = f"global batch {plan.global_batch}, {plan.steps} steps", _notes(plan), LEGEND
        rows, choice = candidates(plan.candidates), plan.chosen and _choice(plan, plan.chosen)
    how = "compiled for the target" if plan.compiled else "ARITHMETIC ESTIMATE, nothing was compiled"
    lines = [
        f"target {plan.target}: {plan.devices} devices of {bytes_of(plan.memory_bytes)}, target "
        f"{plan.limit_bytes / plan.memory_bytes:.0%} = {bytes_of(plan.limit_bytes)}; {work}; {how} in "
        f"{plan.plan_seconds} s{' (cached)' if plan.cached else ''}",
        *([f"not compiled: {plan.why_not_compiled}"] if plan.why_not_compiled else []),
        *notes,
        *("", *align(rows), "", legend, ""),
    ]
    if plan.chosen is None or not choice:
        return "\n".join([*lines, plan.why, *plan.describe_remedies()])
    flags = plan.chosen.overrides()
    lines += [*choice, f"as flags: {_flags(flags)}"]
    if own and not own.items() <= flags.items():
        lines.append(f"the configuration's file sets: {_flags(own)}; with these flags that alone is planned")
    return "\n".join(lines)


def _notes(plan: StepPlan) -> list[str]:
    untimed = [f"time unknown: {plan.untimed}"] if plan.untimed else []
    return [f"precision: {plan.precision}", *untimed, *([] if plan.compiled else [f"seconds: {estimates.ERROR}"])]


def _choice(plan: StepPlan, best: StepCandidate) -> list[str]:
    hours = f", {_hours(plan.hours)} for {plan.steps} steps" if plan.hours is not None else ""
    if plan.validation_hours is not None:
        hours += f" and about {_hours(plan.validation_hours)} of validation"
    elif hours:
        hours += ", without validations: data.validation_limit and eval.examples are 0, all held-out examples"
    if hours and plan.caching_key:
        hours += f", without filling the cache of {plan.caching_key}: one forward pass over all examples, once"
    unit, each = plan.unit
    if unit != "samples" and best.samples_per_second is not None:
        rate = best.samples_per_second * each
        hours += f", {rate:,.0f} {unit}/s ({rate / best.devices_used:,.0f} a device)"
    return [
        f"chosen: {best.name}, recomputation {best.remat}, micro-batch {best.micro_batch} x {best.accumulation} "
        f"accumulated{hours}{_idle(plan, best)}",
        *([f"padding: {best.filling}"] if best.filling else []),
        f"why: {plan.why}",
        *(one.description for one in (plan.validation, plan.generation) if one),
    ]


def _idle(plan: StepPlan, best: StepCandidate) -> str:
    count, used, batch = plan.devices, best.devices_used, plan.global_batch
    if count == used:
        return ""
    idle = f"; {count - used} of {count} devices stay idle"
    if best.data != place.spread(batch, count) or used != best.data:
        return idle
    nearest = " or ".join(map(str, Cut(batch, count, 1).full_batches))
    return f"{idle}: they would make no share smaller, train.global_batch={nearest} would use all"


def _flags(values: Mapping[str, Any]) -> str:
    return " ".join(f"--config.{path}={value}" for path, value in values.items())


def candidates(found: Iterable[StepCandidate]) -> list[tuple[str, ...]]:
    """Returns the head and a row for each candidate; the last cell says why one does not fit."""
    head = ("strategy", "mesh", "remat", "batch x acc", "peak", "est.", "weights", "train+opt", "activ.")
    head += ("TFLOP", "sent", "s/step", "est.", "samples/s", "")
    table: list[tuple[str, ...]] = [head]
    for one in found:
        peak, seconds = (one.estimate.peak_bytes, one.estimate.step_seconds) if one.estimate else (0, None)
        table.append(
            (
                *(one.strategy, one.mesh, one.remat),
                f"{one.micro_batch} x {one.accumulation}" if one.peak_bytes else "-",
                _gb(one.peak_bytes),
                _beside(_gb(peak), peak, one.peak_bytes),
                _gb(one.weights_bytes),
                _gb(one.trainable_bytes + one.optimizer_bytes),
                _gb(one.activation_bytes),
                f"{one.flops / 1e12:.0f}" if one.flops else "-",
                _gb(one.collective_bytes),
                _number(one.step_seconds, 2),
                _beside(_number(seconds, 2), seconds, one.step_seconds),
                _number(one.samples_per_second, 1),
                "" if one.fits else f"no: {one.obstacle}",
            )
        )
    return table


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def simulation_table(plans: Sequence[StepPlan]) -> str:
    lines = [
        f"{'devices':<9}{'target':<12}{'strategy':<11}{'mesh':<22}{'batch x acc':<13}{'remat':<7}{'peak':<9}samples/s"
    ]
    for plan in plans:
        best = plan.chosen
        if best is None:
            reasons = "; ".join([plan.why, *plan.describe_remedies()])
            lines.append(f"{plan.devices:<9}{plan.target:<12}{reasons}")
            continue
        batch = f"{best.micro_batch} x {best.accumulation}"
        lines.append(
            f"{plan.devices:<9}{plan.target:<12}{best.strategy:<11}{best.mesh:<22}{batch:<13}"
            f"{best.remat:<7}{_gb(best.peak_bytes):<9}{_number(best.samples_per_second, 1)}"
        )
    return "\n".join(lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 5e7 else ("0" if size else "-")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _beside(text: str, guess: float | None, compiled: float | None) -> str:
    return f"{text} ({guess / compiled - 1:+.0%})" if guess and compiled and guess != compiled else text


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"
