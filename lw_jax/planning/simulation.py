"""Tables of `plan --simulate`: cost of a job on 1, 2, 4, ... cards, and of changes to it.

The questions are those of the original project's GPU configuration analysis, elastic guide and batch size note; every
figure is a plan's or the arithmetic estimate's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.validation import MADE
from lw_jax.data import examples, pairs, row_sources
from lw_jax.planning import plan_tables

Plan = Mapping[str, Any]
Estimate = Callable[[Config, str], Plan]  # (configuration, target) -> its plan by arithmetic


@dataclasses.dataclass(frozen=True)
class Change:
    """One changed value, everything else as planned; before and after by arithmetic."""

    what: str
    before: Plan | None  # the chosen candidate; None: does not fit
    after: Plan | None


def epoch(cfg: Config) -> int | None:
    """Returns how many training examples there are, before any is dropped: texts, where their questions are packed.

    None for recipe ttt, which counts tokens, and where they are not on this machine.
    """
    data = cfg.data
    if cfg.recipe == "ttt":
        return None
    if data.train in MADE:
        return data.cards
    if not all(map(row_sources.is_here, row_sources.split_sources(data.train))):
        return None
    if cfg.recipe == "dpo":
        return len(pairs.read(data.train, columns=data.columns))
    found = examples.read(data.train, columns=data.columns)
    return len({one.context for one in found}) if data.packed_tokens else len(found)


def text(cfg: Config, plans: Sequence[Plan], *, own: Mapping[str, Any], estimate: Estimate) -> str:
    """Returns the tables of all sizes on which the job fits; empty where it fits on none.

    Args:
        own: what the configuration's file sets of `config.SEARCHED`; its micro-batch is "before", else 1.
    """
    sizes = [one for one in plans if one["devices"] and one["chosen"]]
    if not sizes:
        return ""
    size = epoch(cfg)
    cost = ("GPUs", "memory a GPU", "samples/s", "epoch, min", "hours", "GPU-hours", "beside the first")
    batch = (
        "GPUs",
        "batch a GPU",
        "x data",
        "x accumulated",
        "- padding",
        "= global",
        "GB: frozen",
        "trained",
        "optimizer",
        "rest",
    )
    change = ("GPUs", "change", "hours", "->", "", "peak GB", "->")
    changed = [(one, each) for one in sizes for each in changes(cfg, one, own=own, estimate=estimate)]
    blocks = [
        [_job(cfg, size)],
        plan_tables.align([cost, *(_cost(one, sizes[0], size) for one in sizes)]),
        plan_tables.align([batch, *(_batch(one) for one in sizes)]),
        plan_tables.align([change, *(_changed(*pair) for pair in changed)]),
    ]
    how = "compiled" if all(one["compiled"] for one in sizes) else "by arithmetic"
    notes = [
        f"GB are 1e9 bytes on the fullest GPU; memory, batches and hours {how}, changes by arithmetic on both sides; "
        "hours are of the steps, without validations"
    ]
    return "\n\n".join("\n".join(block) for block in [*blocks, notes])


def changes(cfg: Config, plan: Plan, *, own: Mapping[str, Any], estimate: Estimate) -> list[Change]:
    """Returns the cost of another micro-batch, twice the latents and twice the steps on a plan's cards."""
    chosen, target = plan["chosen"], plan["target"]
    micro = chosen["micro_batch"]

    def asked(**values: Any) -> Plan | None:
        placed = {"mesh.placement": chosen["strategy"], "mesh.data": chosen["data"], "mesh.model": chosen["model"]}
        if chosen["strategy"] == "single":
            placed["mesh.data"] = -1
        whole = placed | {"compute.remat": chosen["remat"], "train.micro_batch": micro} | values
        return estimate(_with(cfg, whole), target)["chosen"]

    planned, first = asked(), own.get("train.micro_batch") or 1
    found = []
    if first != micro:
        found.append(Change(f"batch a GPU {first} -> {micro}", asked(**{"train.micro_batch": first}), planned))
    if cfg.recipe == "latentwire":
        slots = cfg.encoder.slots
        found.append(Change(f"latents {slots} -> {2 * slots}", planned, asked(**{"encoder.slots": 2 * slots})))
    steps = cfg.train.steps
    return [*found, Change(f"steps {steps} -> {2 * steps} (epochs)", planned, asked(**{"train.steps": 2 * steps}))]


def _with(cfg: Config, values: Mapping[str, Any]) -> Config:
    whole = config.to_dict(cfg)
    for path, value in values.items():
        section, _, key = path.partition(".")
        whole[section][key] = value
    return config.build(whole)


def _job(cfg: Config, size: int | None) -> str:
    samples = cfg.train.steps * cfg.train.global_batch
    line = f"{cfg.train.steps} steps x {cfg.train.global_batch} = {samples:,} samples"
    unknown = "not counted in tokens" if cfg.recipe == "ttt" else "not known: the data is not on this machine"
    line += f" = {samples / size:.1f} epochs of {size:,}" if size else f", epochs {unknown}"
    latents = f"; {cfg.encoder.slots} latents x {cfg.encoder.width} a text" if cfg.recipe == "latentwire" else ""
    return line + latents


def _cost(plan: Plan, first: Plan, size: int | None) -> tuple[str, ...]:
    best, count, rate = plan["chosen"], plan["devices"], plan["chosen"]["samples_per_second"]
    share = best["peak_bytes"] / plan["memory_bytes"]
    memory = f"{best['peak_bytes'] / 1e9:.1f} of {plan['memory_bytes'] / 1e9:.1f} GB ({share:.0%})"
    if rate is None or first["hours"] is None:
        return (str(count), memory, "-", "-", "-", "-", "-")
    spent, base = count * plan["hours"], first["devices"] * first["hours"]
    minutes = f"{size / rate / 60:.1f}" if size else "-"
    beside = f"{first['hours'] / plan['hours']:.2f} x as fast, {spent / base:.2f} x the GPU-hours"
    return (str(count), memory, f"{rate:.1f}", minutes, f"{plan['hours']:.2f}", f"{spent:.2f}", beside)


def _batch(plan: Plan) -> tuple[str, ...]:
    best = plan["chosen"]
    data, filling = best["rows"] // (best["micro_batch"] * best["accumulation"]), best["rows"] - plan["global_batch"]
    sizes = (best[f"{part}_bytes"] / 1e9 for part in ("weights", "trainable", "optimizer"))
    rest = (best["activation_bytes"] + best["batch_bytes"]) / 1e9
    words = (plan["devices"], best["micro_batch"], data, best["accumulation"], filling, plan["global_batch"])
    return (*map(str, words), *(f"{size:.2f}" for size in sizes), f"{rest:.2f}")


def _changed(plan: Plan, change: Change) -> tuple[str, ...]:
    def shown(one: Plan | None, key: str, scale: float) -> str:
        if one is None:
            return "does not fit"
        return "-" if one[key] is None else f"{one[key] / scale:.2f}"

    both = change.before and change.after and change.before["hours"] and change.after["hours"]
    factor = f"({change.after['hours'] / change.before['hours']:.2f} x)" if both else ""  # type: ignore[index]
    hours = [shown(one, "hours", 1.0) for one in (change.before, change.after)]
    peaks = [shown(one, "peak_bytes", 1e9) for one in (change.before, change.after)]
    return (str(plan["devices"]), change.what, hours[0], hours[1], factor, *peaks)
