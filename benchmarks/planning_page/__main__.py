"""Writes the tables of docs/planning.md from plans: every strategy on every card.

    python -m benchmarks.planning_page > docs/planning.md                   # makes the plans (cached), minutes each
    python -m benchmarks.planning_page --plans FOLDER > docs/planning.md    # reads FOLDER/TARGET.json, of `plan --json`
    python -m benchmarks.planning_page --plans FOLDER --facts               # one line a target

Figures come from the plans.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planning_page.tables import TARGETS, Plan, Plans, best_of, short
from lw_jax.core import config, config_file, environment
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave

ROOT = Path(__file__).resolve().parents[2]
KEYS = frozenset(  # of a plan
    "target devices compiled memory_bytes limit_bytes steps global_batch hours plan_seconds candidates chosen".split()
)
AGAIN = "make it again with `python run.py plan --json`, or move it away"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the page, or the facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/large.py", help="what is planned (default: configs/large.py)")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="take TARGET.json of there instead of planning")
    parser.add_argument("--facts", action="store_true", help="one line a target instead of the page")
    args = parser.parse_args(argv)
    environment.prepare_compiler(everywhere=True)  # before anything imports JAX, and it must not be silent twice
    cfg = config.build(config_file.load(args.config, root=ROOT))
    plans = load(args.plans, cfg) if args.plans else make(cfg)
    if args.facts:
        print("\n".join(facts(plans)))
        return 0
    from benchmarks.planning_page import page

    print(page.write(cfg, plans, args.config))
    return 0


def load(folder: Path, cfg: Config) -> Plans:
    """Returns the plans of a folder by target, in the page's order; an empty file is left out and told.

    Raises:
        UserError: a file is no plan or one of another configuration, or none is there.
    """
    found: dict[str, Plan] = {}
    for file in sorted(folder.glob("*.json")):
        if file.stat().st_size:
            one = read(file, cfg)
            found[one["target"]] = one
        else:
            print(f"{file}: empty, left out", file=sys.stderr)
    if not found:
        raise UserError(f"{folder}: holds no plan; write TARGET.json there with `python run.py plan --json`")
    known = [target for target in TARGETS if target in found]
    return {target: found[target] for target in [*known, *sorted(found.keys() - set(known))]}


def read(file: Path, cfg: Config) -> Plan:
    """Returns one plan.

    Raises:
        UserError: the file is no plan, or one of another configuration.
    """
    try:
        one = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise UserError(f"{file}: not JSON ({error}); {AGAIN}") from error
    if not isinstance(one, dict) or (absent := KEYS - one.keys()):
        what = f"a plan without {', '.join(sorted(absent))}" if isinstance(one, dict) else "no plan"
        raise UserError(f"{file}: {what}; {AGAIN}")
    for key, wanted in (("global_batch", cfg.train.global_batch), ("steps", cfg.train.steps)):
        if one[key] != wanted:
            raise UserError(f"{file}: planned for train.{key}={one[key]}, the configuration has {wanted}; {AGAIN}")
    return one


def make(cfg: Config) -> Plans:
    """Returns the plan of every target of the page; each is kept by `planner.make`."""
    from lw_jax.planning import planner

    plans = {}
    for target in TARGETS:
        print(f"planning {target}; minutes, the first time", file=sys.stderr, flush=True)
        plans[target] = planner.make(cfg, target)
    return plans


def facts(plans: Plans) -> list[str]:
    """Returns one line a target: what a machine configuration's docstring says."""
    lines = []
    for target, one in plans.items():
        best = best_of(plans, target)
        if best is None:
            lines.append(f"{target}: nothing fits: {'; '.join(map(short, one['candidates']))}")
            continue
        hours = f"{one['hours']:.2f} h for {one['steps']} steps" if one["hours"] is not None else "time not known"
        lines.append(
            f"{target}: {best['strategy']} {best['mesh']}, remat {best['remat']}, micro-batch {best['micro_batch']} x "
            f"{best['accumulation']}, peak {best['peak_bytes'] / 1e9:.1f} of {one['limit_bytes'] / 1e9:.1f} GB, {hours}"
        )
    return lines


if __name__ == "__main__":
    leave(main)
