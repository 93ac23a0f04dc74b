"""Tables of plans for people."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lw_jax.core.config import flags
from lw_jax.core.progress import duration
from lw_jax.planning import estimate as estimates
from lw_jax.planning.plans import Plan, StepCandidate, StepPlan
from lw_jax.planning.start_plan import TEXT, ReaderPlan, StartCandidate, StartPlan, Work
from lw_jax.training.memory import bytes_of
from sharding import place
from sharding.place import Cut

LEGEND = "GB (1e9 bytes) a device; est.: arithmetic estimate and its distance from the compiled figure; times predicted"
START_LEGEND = (
    "bytes of one device; peak: weights of all readers and one batch of texts read or written; est.: arithmetic "
    "estimate and its distance from the compiled figure; times by arithmetic"
)


def report(plan: Plan, *, own: Mapping[str, Any] | None = None) -> str:
    """Returns a plan as text; `own` are the values of `config.SEARCHED` that the configuration's file sets."""
    if isinstance(plan, StartPlan):
        work = f"no step, a start from at most {plan.texts} texts of at most {plan.tokens} tokens, {plan.rows} at once"
        notes, legend = [], START_LEGEND
        rows, choice = _start_rows(plan.candidates), plan.chosen and _start_choice(plan, plan.chosen)
    else:
        assert isinstance(plan, StepPlan), "there are two kinds"
        work, legend = f"global batch {plan.global_batch}, {plan.steps} steps", LEGEND
        notes = [f"precision: {plan.precision}", *([f"time unknown: {plan.untimed}"] if plan.untimed else [])]
        notes += [] if plan.compiled else [f"seconds: {estimates.ERROR}"]
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
    chosen = plan.chosen.overrides()
    lines += [*choice, f"as flags: {' '.join(flags(chosen))}"]
    if own and not own.items() <= chosen.items():
        lines.append(f"the configuration's file sets: {' '.join(flags(own))}; with these flags that alone is planned")
    return "\n".join(lines)


def _choice(plan: StepPlan, best: StepCandidate) -> list[str]:
    hours = f", {duration(plan.hours * 3600)} for {plan.steps} steps" if plan.hours is not None else ""
    if plan.validation_hours is not None:
        hours += f" and about {duration(plan.validation_hours * 3600)} of validation"
    elif hours:
        hours += ", without validations: data.validation_limit and eval.examples are 0, all held-out examples"
    if plan.start_hours is not None:
        hours += f", after {duration(plan.start_hours * 3600)} for the start without compiling"
    if hours and plan.caching_key:
        hours += f", without filling the cache of {plan.caching_key}: one forward pass over all examples, once"
    unit, per_example = plan.unit
    if unit != "samples" and best.samples_per_second is not None:
        rate = best.samples_per_second * per_example
        hours += f", {rate:,.0f} {unit}/s ({rate / best.devices_used:,.0f} a device)"
    return [
        f"chosen: {best.name}, recomputation {best.remat}, micro-batch {best.micro_batch} x {best.accumulation} "
        f"accumulated{hours}{_idle(plan, best)}",
        *([f"padding: {best.filling}"] if best.filling else []),
        f"why: {plan.why}",
        *(memory.description for memory in (plan.validation, plan.generation) if memory),
        *([f"start: {bytes_of(plan.start_peak_bytes)} per device"] if plan.start_peak_bytes else []),
        f"host memory of a process: {bytes_of(plan.host_memory_bytes)}",
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


def candidates(options: Iterable[StepCandidate]) -> list[tuple[str, ...]]:
    """Returns the head and a row for each candidate; the last cell says why one does not fit."""
    head = ("strategy", "mesh", "remat", "batch x acc", "peak", "est.", "weights", "train+opt", "activ.")
    head += ("TFLOP", "sent", "s/step", "est.", "samples/s", "")
    table: list[tuple[str, ...]] = [head]
    for option in options:
        peak, seconds = (option.estimate.peak_bytes, option.estimate.step_seconds) if option.estimate else (0, None)
        table.append(
            (
                *(option.strategy, option.mesh, option.remat),
                f"{option.micro_batch} x {option.accumulation}" if option.peak_bytes else "-",
                _gb(option.peak_bytes),
                _beside(_gb(peak), peak, option.peak_bytes),
                _gb(option.weights_bytes),
                _gb(option.trainable_bytes + option.optimizer_bytes),
                _gb(option.activation_bytes),
                f"{option.flops / 1e12:.0f}" if option.flops else "-",
                _gb(option.collective_bytes),
                number(option.step_seconds, ".2f"),
                _beside(number(seconds, ".2f"), seconds, option.step_seconds),
                number(option.samples_per_second, ".1f"),
                "" if option.fits else f"no: {option.obstacle}",
            )
        )
    return table


def _start_choice(plan: StartPlan, best: StartCandidate) -> list[str]:
    seconds = f", {duration(plan.hours * 3600)} for the start without compiling" if plan.hours is not None else ""
    return [f"chosen: {best.name}{seconds}", *(_text(name, part, plan.ratio) for name, part in best.readers.items())]


def _text(name: str, reader: ReaderPlan, ratio: int) -> str:
    memory = (
        f"{bytes_of(reader.text_bytes)} of keys and values, {bytes_of(reader.message_bytes)} of its message at "
        f"encoder.ratio={ratio} while it answers"
    )
    times = ""
    if reader.read_seconds is not None and reader.write_seconds is not None:
        times = f"read in {reader.read_seconds:.3g} s, written in {reader.write_seconds:.3g} s, "
    return f"{name}: a text of {TEXT:,} tokens: {times}{memory}"


def _start_rows(candidates: tuple[StartCandidate, ...]) -> list[tuple[str, ...]]:
    head = ("strategy", "mesh", "reader", "weights", "code", "basis", "reading", "est.", "writing", "est.")
    table: list[tuple[str, ...]] = [(*head, "TFLOP", "s/start", "")]
    for candidate in candidates:
        for name, reader in candidate.readers.items():
            table.append(
                (
                    candidate.strategy,
                    candidate.mesh,
                    name,
                    *map(bytes_of, (reader.weights_bytes, reader.code_bytes, reader.basis_bytes)),
                    *_both(reader.reading),
                    *_both(reader.writing),
                    f"{reader.flops / 1e12:.3g}",
                    number(reader.seconds, ".1f"),
                    "",
                )
            )
        peak = f"peak {bytes_of(candidate.peak_bytes)}"
        table[-1] = (*table[-1][:-1], peak if candidate.fits else f"{peak}, no: {candidate.obstacle}")
    return table


def _both(work: Work) -> tuple[str, str]:
    guess = _beside(bytes_of(work.estimate_bytes), work.estimate_bytes, work.peak_bytes)
    return bytes_of(work.peak_bytes), guess


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def simulation_table(plans: Sequence[StepPlan]) -> str:
    head = ("devices", "target", "strategy", "mesh", "batch x acc", "remat", "peak", "samples/s")
    rows: list[tuple[str, ...]] = [head]
    for plan in plans:
        if (best := plan.chosen) is None:
            reasons = "; ".join([plan.why, *plan.describe_remedies()])
            rows.append((str(plan.devices), plan.target, *["-"] * 5, reasons))
            continue
        batch = f"{best.micro_batch} x {best.accumulation}"
        figures = _gb(best.peak_bytes), number(best.samples_per_second, ".1f")
        rows.append((str(plan.devices), plan.target, best.strategy, best.mesh, batch, best.remat, *figures))
    return "\n".join(align(rows))


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 5e7 else ("0" if size else "-")


def number(value: float | None, form: str) -> str:
    """Returns a formatted number; "-" where there is none."""
    return "-" if value is None else format(value, form)


def _beside(text: str, guess: float | None, compiled: float | None) -> str:
    return f"{text} ({guess / compiled - 1:+.0%})" if guess and compiled and guess != compiled else text
