"""Tables of `plan --simulate`: cost of a job on 1, 2, 4, ... cards, and of changes to it.

The questions are those of the original project's GPU configuration analysis, elastic guide and batch size note; every
figure is a plan's or the arithmetic estimate's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from lw_jax import recipes
from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.validation import MADE
from lw_jax.data import examples, pairs, row_sources
from lw_jax.planning import plan_tables
from lw_jax.planning.plans import StepCandidate, StepPlan
from lw_jax.recipes.latentwire import LatentWire

Estimate = Callable[[Config, str], StepPlan]  # (configuration, target) -> its plan by arithmetic


@dataclasses.dataclass(frozen=True)
class Change:
    """One changed value, everything else as planned; before and after by arithmetic."""

    what: str
    before: StepCandidate | None  # the chosen candidate; None: does not fit
    after: StepCandidate | None


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
        every = pairs.read(data.train, columns=data.columns)
        return len(every if data.validation else pairs.split(every, data.held_out, cfg.seed)[0])
    samples = examples.read(data.train, columns=data.columns)
    return len({sample.context for sample in samples}) if data.packed_tokens else len(samples)


def text(cfg: Config, plans: Sequence[StepPlan], *, own: Mapping[str, Any], estimate: Estimate) -> str:
    """Returns the tables of all sizes on which the job fits; empty where it fits on none.

    Args:
        own: what the configuration's file sets of `config.SEARCHED`; its micro-batch is "before", else 1.
    """
    sizes = [(plan, plan.chosen) for plan in plans if plan.devices and plan.chosen]
    if not sizes:
        return ""
    first, _ = sizes[0]
    size = epoch(cfg)
    cost = ("GPUs", "memory a GPU", "samples/s", "epoch, min", "hours", "GPU-hours", "beside the first")
    batch = ("GPUs", "batch a GPU", "x data", "x accumulated", "- padding", "= global")
    batch += ("GB: frozen", "trained", "optimizer", "rest")
    change = ("GPUs", "change", "hours", "->", "", "peak GB", "->")
    changed = [
        (plan, each) for plan, best in sizes for each in changes(cfg, plan.target, best, own=own, estimate=estimate)
    ]
    blocks = [
        [_job(cfg, size)],
        plan_tables.align([cost, *(_cost(*pair, first, size) for pair in sizes)]),
        plan_tables.align([batch, *(_batch(*pair) for pair in sizes)]),
        plan_tables.align([change, *(_changed(*pair) for pair in changed)]),
    ]
    how = "compiled" if all(plan.compiled for plan, _ in sizes) else "by arithmetic"
    notes = [
        f"GB are 1e9 bytes on the fullest GPU; memory, batches and hours {how}, changes by arithmetic on both sides; "
        "hours are of the steps, without validations"
    ]
    return "\n\n".join("\n".join(block) for block in [*blocks, notes])


def changes(
    cfg: Config, target: str, best: StepCandidate, *, own: Mapping[str, Any], estimate: Estimate
) -> list[Change]:
    """Returns the cost of another micro-batch, twice the latents and twice the steps on a plan's cards."""
    micro = best.micro_batch

    def replan(**values: Any) -> StepCandidate | None:
        changed = ConfigDict(dataclasses.asdict(cfg))
        changed.update_from_flattened_dict(best.overrides() | values)
        return estimate(config.build(changed), target).chosen

    planned, first = replan(), own.get("train.micro_batch") or 1
    costs = []
    if first != micro:
        costs.append(Change(f"batch a GPU {first} -> {micro}", replan(**{"train.micro_batch": first}), planned))
    slots = cfg.encoder.slots
    if recipes.kind_of(cfg) is LatentWire and 2 * slots <= cfg.encoder.window:
        costs.append(Change(f"latents {slots} -> {2 * slots}", planned, replan(**{"encoder.slots": 2 * slots})))
    steps = cfg.train.steps
    return [*costs, Change(f"steps {steps} -> {2 * steps} (epochs)", planned, replan(**{"train.steps": 2 * steps}))]


def _job(cfg: Config, size: int | None) -> str:
    samples = cfg.train.steps * cfg.train.global_batch
    line = f"{cfg.train.steps} steps x {cfg.train.global_batch} = {samples:,} samples"
    unknown = "not counted in tokens" if cfg.recipe == "ttt" else "not known: the data is not on this machine"
    # Other stages read passages.
    asked = cfg.train.global_batch * sum(steps for name, _, steps in config.stages(cfg) if name == "answer")
    line += f" = {asked / size:.1f} epochs of {size:,}" if size else f", epochs {unknown}"
    if recipes.kind_of(cfg) is LatentWire:
        line += f"; {cfg.encoder.slots} latents x {cfg.encoder.width} a text"
    return line


def _cost(plan: StepPlan, best: StepCandidate, first: StepPlan, size: int | None) -> tuple[str, ...]:
    count, rate, hours = plan.devices, best.samples_per_second, plan.hours
    share = best.peak_bytes / plan.memory_bytes
    memory = f"{best.peak_bytes / 1e9:.1f} of {plan.memory_bytes / 1e9:.1f} GB ({share:.0%})"
    if rate is None or hours is None or first.hours is None:
        return (str(count), memory, "-", "-", "-", "-", "-")
    spent, base = count * hours, first.devices * first.hours
    minutes = f"{size / rate / 60:.1f}" if size else "-"
    beside = f"{first.hours / hours:.2f} x as fast, {spent / base:.2f} x the GPU-hours"
    return (str(count), memory, f"{rate:.1f}", minutes, f"{hours:.2f}", f"{spent:.2f}", beside)


def _batch(plan: StepPlan, best: StepCandidate) -> tuple[str, ...]:
    data, padding = best.rows // (best.micro_batch * best.accumulation), best.rows - plan.global_batch
    working = best.activation_bytes + best.batch_bytes
    sizes = (best.weights_bytes, best.trainable_bytes, best.optimizer_bytes, working)
    words = (plan.devices, best.micro_batch, data, best.accumulation, padding, plan.global_batch)
    return (*map(str, words), *(f"{size / 1e9:.2f}" for size in sizes))


def _changed(plan: StepPlan, change: Change) -> tuple[str, ...]:
    both = change.before, change.after
    hours = [best and best.hours for best in both]
    factor = f"({hours[1] / hours[0]:.2f} x)" if hours[0] and hours[1] else ""
    times = ["does not fit" if best is None else "-" if best.hours is None else f"{best.hours:.2f}" for best in both]
    peaks = ["does not fit" if best is None else f"{best.peak_bytes / 1e9:.2f}" for best in both]
    return (str(plan.devices), change.what, *times, factor, *peaks)
