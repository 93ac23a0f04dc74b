"""Prints the tables of docs/planning.md from plans: every strategy on every card. The page's prose is written by hand.

python benchmarks/planning_page.py                   # makes the plans (cached), minutes each
python benchmarks/planning_page.py --plans FOLDER    # reads FOLDER/TARGET.json, of `plan --json`
"""

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
    parser, assignments, rest = common.parser(__doc__, argv, "configs/large.py")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="take TARGET.json of there instead of planning")
    args = parser.parse_args(rest)
    environment.prepare_compiler(everywhere=True)  # before anything imports JAX, and it must not be silent twice
    plans = load(args.plans) if args.plans else make(common.load(args.config, assignments))
    for section in (chosen(plans), candidates(plans), agreement(plans)):
        print("\n".join(section), end="\n\n")
    return 0


def load(folder: Path) -> Plans:
    """Returns the plans of a folder by target, in the page's order; raises UserError for a file that is none."""
    from lw_jax.planning.plans import StepPlan

    remedy = "make it again with `python run.py plan --json`"
    found = {one.target: one for one in (schema.read(file, StepPlan, remedy=remedy) for file in folder.glob("*.json"))}
    if not found:
        raise UserError(f"{folder}: holds no plan; write TARGET.json there with `python run.py plan --json`")
    return {target: found[target] for target in [*TARGETS, *sorted(found.keys() - set(TARGETS))] if target in found}


def make(cfg: Config) -> Plans:
    """Returns the plan of every target of the page; each is kept by `planner.make`."""
    from lw_jax.planning import planner

    plans = {}
    for target in TARGETS:
        common.say(f"planning {target}; minutes, the first time")
        plans[target] = planner.make(cfg, target)
    return plans


def chosen(plans: Plans) -> list[str]:
    from lw_jax.planning import plan_tables

    head = ("target", "strategy", "mesh", "remat", "batch", "peak GB", "limit GB", "s/step", "samples/s", "hours")
    rows = []
    for target, one in plans.items():
        limit, took = number(one.limit_bytes, ".1f", 1e-9), number(one.plan_seconds, ".0f")
        if one.chosen is None:
            rows.append((target, "nothing fits", "", "", "", "", limit, "", "", "", took))
            continue
        _, best = plan_tables.candidates([one.chosen])
        rows.append((target, *best[:5], limit, best[11], best[13], number(one.chosen.hours, ".2f"), took))
    return ["## What is chosen", "", common.table((*head, "plan took s"), rows)]


def candidates(plans: Plans) -> list[str]:
    """Returns every candidate of every card, compiled beside the estimate."""
    lines = ["## Every candidate, compiled beside arithmetic"]
    for card, title in (CARDS | {"": "Others"}).items():
        cards = {target: target.rpartition("x")[0] for target in plans}
        own = {target: plans[target] for target, known in cards.items() if card == (known if known in CARDS else "")}
        if own:
            lines += ["", f"### {title}", "", _measured(own, card)]
    return lines


def _measured(plans: Plans, card: str) -> str:
    from lw_jax.planning import plan_tables

    alone, rows, head = plans[f"{card}x1"].candidates if f"{card}x1" in plans else (), [], ()
    for target, one in plans.items():
        head, *cells = plan_tables.candidates(one.candidates)
        for row, cell in zip(one.candidates, cells, strict=True):
            if row.peak_bytes and (one.devices == 1 or row == one.chosen or row not in alone):
                verdict = "**chosen**" if row == one.chosen else "" if row.fits else f"no: {short(row)}"
                rows.append((str(one.devices) if card else target, *cell[:6], *cell[9:-1], verdict))
    return common.table(("GPUs" if card else "target", *head[:6], *head[9:]), rows)


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


def short(row: "StepCandidate") -> str:
    """Returns why a candidate cannot be, without the remedy and what its row says already."""
    uneven = re.search(r"(\S+) \([\d, ]+\): dim \d+ \((\d+)\) does not divide mesh axis (\w+=\d+)", row.obstacle)
    if uneven:
        return f"{uneven[2]} of {uneven[1]} is not divisible by {uneven[3]}"
    return row.obstacle.partition(";")[0].rpartition(": ")[2]


if __name__ == "__main__":
    leave(main)
