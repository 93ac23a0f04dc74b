"""Comparison of the job with other numbers of the same GPU."""

import dataclasses
from collections.abc import Sequence

from lw_jax.core.config import Config
from lw_jax.planning import gpus, plan_tables
from lw_jax.planning.planner import SIZES, kept, make
from lw_jax.planning.plans import Plan


def other_sizes(cfg: Config, plan: Plan) -> Sequence[Plan]:
    """Returns plans of other numbers of the same GPU, on the same basis as the job's own where possible.

    Uses cached compiled plans and compiles none. If one is missing, all sizes are estimated, the job's own too (see
    `compare`). Returns nothing where the command line sets the placement, or for a run without steps.
    """
    if cfg.mesh.placement != "auto" or not cfg.train.steps:
        return []
    card = gpus.parse(plan.target).card.name
    targets = [target for count in SIZES.values() if (target := f"{card}x{count}") != plan.target]
    compiled = [cached for target in targets if plan.compiled and (cached := kept(cfg, target))]
    if plan.compiled and len(compiled) == len(targets):
        return compiled
    job_targets = [plan.target] if plan.compiled else []
    return [*compiled, *(make(cfg, target, estimate=True) for target in (*targets, *job_targets))]


def compare(plans: Sequence[Plan], *, hours: float) -> list[str]:
    """Returns a table of sizes and prices, header first, without mixing compiled and estimated hours.

    Args:
        plans: the job's own first; several of one target where one is compiled and one is estimated.
        hours: of the job, whatever its plan says; scales the other sizes too.

    Compiled and estimated hours differ by up to a half, so they never share a column: if a size is only estimated,
    every size has its estimate in separate columns.
    """
    predicted = plans[0].hours or hours or 1.0  # a finished run has none left
    plans, factor = [dataclasses.replace(plans[0], hours=predicted), *plans[1:]], hours / predicted
    bases = [{plan.target: plan for plan in reversed(plans) if plan.compiled is basis} for basis in (True, False)]
    mixed = all(bases)
    columns = ["hours", "GPU-hours"] + (["est. hours", "est. GPU-hours"] if mixed else [])
    rows = [["size", "GPUs", *columns, "plan"]]
    sizes = {plan.target: plan.devices for plan in plans}
    for target, count in sorted(sizes.items(), key=lambda item: item[1]):
        versions = [basis.get(target) for basis in bases if basis]
        best = next(plan for plan in versions if plan)
        how = "" if best.compiled else " (estimate)"
        price = [cell for plan in versions for cell in _price(plan, count, factor)]
        rows.append([target, str(count), *price, best.chosen.strategy + how if best.chosen else "does not fit"])
    scaled = len(sizes) > 1 and abs(factor - 1) > 0.005
    notes = [f"every size x {factor:.2f}: the job's hours over the predicted ones"] if scaled else []
    if mixed:
        notes.append("est.: by arithmetic, for all sizes; `plan --simulate 1,2,4` compiles them")
    return [*plan_tables.align(rows), *notes]


def _price(plan: Plan | None, count: int, factor: float) -> list[str]:
    if plan is None or not plan.chosen or plan.hours is None:
        return ["-", "-"]
    hours = plan.hours * factor
    return [f"{hours:.2f}", f"{count * hours:.1f}"]
