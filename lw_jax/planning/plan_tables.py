"""Tables of plans for people."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lw_jax.planning import estimate as estimates
from lw_jax.planning import remedies
from lw_jax.planning.planner import Plan, overrides
from lw_jax.training.memory import bytes_of
from sharding import place
from sharding.place import Cut


def report(found: Plan, *, own: Mapping[str, Any] | None = None) -> str:
    """Returns a plan as text; `own` are the values of `config.SEARCHED` that the configuration's file sets."""
    gib = found["memory_bytes"]
    how = "compiled for the target" if found["compiled"] else "ARITHMETIC ESTIMATE, nothing was compiled"
    lines = [
        f"target {found['target']}: {found['devices']} devices of {bytes_of(gib)}, target "
        f"{found['limit_bytes'] / gib:.0%} = {bytes_of(found['limit_bytes'])}; global batch {found['global_batch']}, "
        f"{found['steps']} steps; {how} in {found['plan_seconds']} s{' (cached)' if found.get('cached') else ''}"
    ]
    lines.append(f"precision: {found['precision']}")
    if "why_not_compiled" in found:
        lines.append(f"not compiled: {found['why_not_compiled']}")
    if found.get("untimed"):
        lines.append(f"time unknown: {found['untimed']}")
    if not found["compiled"]:
        lines.append(f"seconds: {estimates.ERROR}")
    lines += ["", *_table(found["candidates"]), ""]
    lines.append(
        "GB (1e9 bytes) a device; est.: arithmetic estimate and its distance from the compiled figure; times predicted"
    )
    chosen = found["chosen"]
    if chosen is None:
        return "\n".join([*lines, "", found["why"], *remedies.describe(found["remedies"])])
    hours = f", {_hours(found['hours'])} for {found['steps']} steps" if found["hours"] is not None else ""
    if found.get("validation_hours") is not None:
        hours += f" and about {_hours(found['validation_hours'])} of validation"
    elif hours:
        hours += ", without validations: data.validation_limit and eval.examples are 0, all held-out examples"
    if hours and found.get("caching_key"):
        hours += f", without filling the cache of {found['caching_key']}: one forward pass over all examples, once"
    unit, each = found["unit"]
    if unit != "samples" and chosen["samples_per_second"] is not None:
        rate = chosen["samples_per_second"] * each
        hours += f", {rate:,.0f} {unit}/s ({rate / chosen['devices_used']:,.0f} a device)"
    lines += [
        "",
        f"chosen: {chosen['strategy']} {chosen['mesh']}, recomputation {chosen['remat']}, micro-batch "
        f"{chosen['micro_batch']} x {chosen['accumulation']} accumulated{hours}{_idle(found)}",
        *([f"padding: {chosen['filling']}"] if chosen.get("filling") else []),
        f"why: {found['why']}",
        *(found[part]["description"] for part in ("validation", "generation") if found[part]),
        f"as flags: {_flags(overrides(chosen))}",
    ]
    if own and not own.items() <= overrides(chosen).items():
        lines.append(f"the configuration's file sets: {_flags(own)}; with these flags that alone is planned")
    return "\n".join(lines)


def _idle(found: Plan) -> str:
    """Returns how many devices the chosen candidate leaves out, and the batches on which all would share the work."""
    count, used, batch = found["devices"], found["chosen"]["devices_used"], found["global_batch"]
    if count == used:
        return ""
    told = f"; {count - used} of {count} devices stay idle"
    if found["chosen"]["data"] != place.spread(batch, count) or used != found["chosen"]["data"]:
        return told
    nearest = " or ".join(map(str, Cut(batch, count, 1).full_batches))
    return f"{told}: they would make no share smaller, train.global_batch={nearest} would use all"


def _flags(values: Mapping[str, Any]) -> str:
    return " ".join(f"--config.{path}={value}" for path, value in values.items())


def _table(rows: Iterable[Plan]) -> list[str]:
    head = ("strategy", "mesh", "remat", "batch x acc", "peak", "est.", "weights", "train+opt", "activ.")
    head += ("TFLOP", "sent", "s/step", "est.", "samples/s", "")
    table: list[tuple[str, ...]] = [head]
    for row in rows:
        guess = row["estimate"] or {}
        known = row["peak_bytes"] > 0
        table.append(
            (
                row["strategy"],
                row["mesh"],
                row["remat"],
                f"{row['micro_batch']} x {row['accumulation']}" if known else "-",
                _gb(row["peak_bytes"]),
                _beside(_gb(guess.get("peak_bytes", 0)), guess.get("peak_bytes"), row["peak_bytes"]),
                _gb(row["weights_bytes"]),
                _gb(row["trainable_bytes"] + row["optimizer_bytes"]),
                _gb(row["activation_bytes"]),
                f"{row['flops'] / 1e12:.0f}" if row["flops"] else "-",
                _gb(row["collective_bytes"]),
                _number(row["step_seconds"], 2),
                _beside(_number(guess.get("step_seconds"), 2), guess.get("step_seconds"), row["step_seconds"]),
                _number(row["samples_per_second"], 1),
                "" if row["fits"] else f"no: {row['obstacle']}",
            )
        )
    return align(table)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def simulation_table(plans: Sequence[Plan]) -> str:
    """Returns one line for each number of devices."""
    lines = [
        f"{'devices':<9}{'target':<12}{'strategy':<11}{'mesh':<22}{'batch x acc':<13}{'remat':<7}{'peak':<9}samples/s"
    ]
    for plan in plans:
        best = plan["chosen"]
        if best is None:
            reasons = "; ".join([plan["why"], *remedies.describe(plan["remedies"])])
            lines.append(f"{plan['devices']:<9}{plan['target']:<12}{reasons}")
            continue
        batch = f"{best['micro_batch']} x {best['accumulation']}"
        lines.append(
            f"{plan['devices']:<9}{plan['target']:<12}{best['strategy']:<11}{best['mesh']:<22}{batch:<13}"
            f"{best['remat']:<7}{_gb(best.get('peak_bytes', 0)):<9}{_number(best.get('samples_per_second'), 1)}"
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
