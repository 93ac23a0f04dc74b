"""Prints the tables of docs/planning.md from plans: every strategy on every card. The page's prose is written by hand.

python -m benchmarks.planning_page                   # makes the plans (cached), minutes each
python -m benchmarks.planning_page --plans FOLDER    # reads FOLDER/TARGET.json, of `plan --json`
"""

import argparse
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import common
from benchmarks.common import number
from lw_jax.core import environment, schema
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave

if TYPE_CHECKING:
    from lw_jax.planning.plans import StepCandidate, StepPlan  # imports JAX

Plans = Mapping[str, "StepPlan"]  # by target

CARDS = {"h100": "H100 80 GB", "a100_40": "A100 40 GB", "a100_80": "A100 80 GB"}
COUNTS = {"h100": (1, 2, 3, 4, 5, 6, 7, 8), "a100_40": (1, 2, 3, 4, 8), "a100_80": (1, 2, 3, 4, 8)}
TARGETS = (*(f"{card}x{count}" for card, counts in COUNTS.items() for count in counts), "h200x1", "2xh100x8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/large.py", help="what is planned (default: configs/large.py)")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="take TARGET.json of there instead of planning")
    args = parser.parse_args(argv)
    environment.prepare_compiler(everywhere=True)  # before anything imports JAX, and it must not be silent twice
    cfg = common.load(args.config, {})
    plans = load(args.plans, cfg) if args.plans else make(cfg)
    for section in (chosen(plans), candidates(plans), refused(plans), agreement(plans)):
        print("\n".join(section), end="\n\n")
    return 0


def load(folder: Path, cfg: Config) -> Plans:
    """Returns the plans of a folder by target, in the page's order.

    Raises:
        UserError: a file is no plan or one of another configuration, or none is there.
    """
    from lw_jax.planning.plans import StepPlan

    found: dict[str, StepPlan] = {}
    for file in sorted(folder.glob("*.json")):
        one = schema.read(file, StepPlan, remedy="make it again with `python run.py plan --json`")
        if (one.global_batch, one.steps) != (cfg.train.global_batch, cfg.train.steps):
            had = f"train.global_batch={one.global_batch}, train.steps={one.steps}"
            raise UserError(f"{file}: planned for {had}, the configuration has others; plan it again")
        found[one.target] = one
    if not found:
        raise UserError(f"{folder}: holds no plan; write TARGET.json there with `python run.py plan --json`")
    order = [*TARGETS, *found]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def make(cfg: Config) -> Plans:
    """Returns the plan of every target of the page; each is kept by `planner.make`."""
    from lw_jax.planning import planner

    plans = {}
    for target in TARGETS:
        print(f"planning {target}; minutes, the first time", file=sys.stderr, flush=True)
        plans[target] = planner.make(cfg, target)
    return plans


def chosen(plans: Plans) -> list[str]:
    head = ("target", "strategy", "mesh", "remat", "batch", "peak GB", "limit GB", "s/step", "samples/s", "hours")
    rows = []
    for target, one in plans.items():
        best, limit, took = one.chosen, number(one.limit_bytes / 1e9, ".1f"), number(one.plan_seconds, ".0f")
        if best is None:
            rows.append((target, "nothing fits", "", "", "", "", limit, "", "", "", took))
            continue
        speed = number(best.step_seconds, ".2f"), number(best.samples_per_second, ".1f"), number(best.hours, ".2f")
        peak = number(best.peak_bytes / 1e9, ".1f")
        rows.append((target, best.strategy, best.mesh, best.remat, batch(best), peak, limit, *speed, took))
    return ["## What is chosen", "", common.table((*head, "plan took s"), rows)]


def candidates(plans: Plans) -> list[str]:
    """Returns every candidate of every card, compiled beside the estimate."""
    lines = ["## Every candidate, compiled beside arithmetic"]
    for card, title in (CARDS | {"": "Others"}).items():
        own = {target: one for target, one in plans.items() if target.rpartition("x")[0] == card}
        if not card:
            own = {target: one for target, one in plans.items() if target.rpartition("x")[0] not in CARDS}
        if own:
            lines += ["", f"### {title}", "", _measured(own, card)]
    return lines


def _measured(plans: Plans, card: str) -> str:
    head = ("GPUs" if card else "target", "strategy", "mesh", "remat", "batch", "peak GB", "est.", "TFLOP", "est.")
    head += ("GB sent", "s/step", "est.", "samples/s", "")
    alone = plans[f"{card}x1"].candidates if f"{card}x1" in plans else ()
    rows = [
        (str(one.devices) if card else target, *_candidate(row, one.chosen))
        for target, one in plans.items()
        for row in one.candidates
        if row.peak_bytes and (one.devices == 1 or row == one.chosen or row not in alone)
    ]
    return common.table(head, rows)


def _candidate(row: "StepCandidate", best: "StepCandidate | None") -> tuple[str, ...]:
    verdict = "**chosen**" if row == best else ("" if row.fits else f"no: {short(row)}")
    return (
        *(row.strategy, row.mesh, row.remat, batch(row)),
        *(number(row.peak_bytes / 1e9, ".1f"), _beside(row, "peak_bytes", 1e9, 1)),
        *(number(row.flops / 1e12 if row.flops else None, ".0f"), _beside(row, "flops", 1e12, 0)),
        number(row.collective_bytes / 1e9 if row.flops else None, ".1f"),
        *(number(row.step_seconds, ".2f"), _beside(row, "step_seconds", 1, 2)),
        *(number(row.samples_per_second, ".1f"), verdict),
    )


def _beside(row: "StepCandidate", key: str, unit: float, digits: int) -> str:
    guess, compiled = getattr(row.estimate, key, None), getattr(row, key)
    return f"{guess / unit:.{digits}f} ({guess / compiled - 1:+.0%})" if guess is not None and compiled else "-"


def refused(plans: Plans) -> list[str]:
    """Returns one line a reason with the candidates that it refused before anything was compiled."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for target, one in plans.items():
        for row in one.candidates:
            if not row.peak_bytes:
                named = f"tensor {row.mesh}" if row.strategy == "tensor" and "?" not in row.mesh else row.strategy
                reasons.setdefault(short(row), {}).setdefault(target, []).append(named)
    lines = []
    for reason, by_target in reasons.items():
        where = [f"{target}: {', '.join(names)}" for target, names in by_target.items()]
        lines.append(f"- {reason}: {'; '.join(where)}.")
    return ["### Refused before compiling", "", *lines] if lines else []


def agreement(plans: Plans) -> list[str]:
    rows = [row for one in plans.values() if one.compiled for row in one.candidates if row.flops]
    body = []
    for name in [*dict.fromkeys(row.strategy for row in rows), "all"]:
        own = [row for row in rows if name in (row.strategy, "all")]
        body.append((name, str(len(own)), *(_spread(own, key) for key in ("peak_bytes", "flops", "step_seconds"))))
    title = "### How far arithmetic lies from the compiled figures: median (least to most)"
    return [title, "", common.table(("strategy", "candidates", "peak", "FLOPs", "seconds"), body)]


def _spread(rows: "Sequence[StepCandidate]", key: str) -> str:
    off = [getattr(row.estimate, key) / getattr(row, key) - 1 for row in rows if row.estimate and getattr(row, key)]
    return f"{statistics.median(off):+.0%} ({min(off):+.0%} to {max(off):+.0%})" if off else "-"


def batch(row: "StepCandidate") -> str:
    return f"{row.micro_batch} x {row.accumulation}"


def short(row: "StepCandidate") -> str:
    """Returns why a candidate cannot be, without the remedy and what its row says already."""
    uneven = re.search(r"(\S+) \([\d, ]+\): dim \d+ \((\d+)\) does not divide mesh axis (\w+=\d+)", row.obstacle)
    if uneven:
        return f"{uneven[2]} of {uneven[1]} is not divisible by {uneven[3]}"
    return row.obstacle.partition(";")[0].rpartition(": ")[2]


if __name__ == "__main__":
    leave(main)
