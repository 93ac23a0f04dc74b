"""Prints the tables of docs/planning.md from plans: every strategy on every card. The page's prose is written by hand.

python -m benchmarks.planning_page                   # makes the plans (cached), minutes each
python -m benchmarks.planning_page --plans FOLDER    # reads FOLDER/TARGET.json, of `plan --json`
"""

import argparse
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lw_jax.core import config, config_file, environment
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave

ROOT = Path(__file__).resolve().parents[1]
Plan = Mapping[str, Any]  # what `plan --json` prints
Plans = Mapping[str, Plan]  # by target

CARDS = {"h100": "H100 80 GB", "a100_40": "A100 40 GB", "a100_80": "A100 80 GB"}
COUNTS = {"h100": (1, 2, 3, 4, 5, 6, 7, 8), "a100_40": (1, 2, 3, 4, 8), "a100_80": (1, 2, 3, 4, 8)}
TARGETS = (*(f"{card}x{count}" for card, counts in COUNTS.items() for count in counts), "h200x1", "2xh100x8")
KEYS = frozenset(  # of a plan
    "target devices compiled memory_bytes limit_bytes steps global_batch hours plan_seconds candidates chosen".split()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/large.py", help="what is planned (default: configs/large.py)")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="take TARGET.json of there instead of planning")
    args = parser.parse_args(argv)
    environment.prepare_compiler(everywhere=True)  # before anything imports JAX, and it must not be silent twice
    cfg = config.build(config_file.load(args.config, root=ROOT))
    plans = load(args.plans, cfg) if args.plans else make(cfg)
    for section in (chosen(plans), candidates(plans), refused(plans), agreement(plans)):
        print("\n".join(section), end="\n\n")
    return 0


def load(folder: Path, cfg: Config) -> Plans:
    """Returns the plans of a folder by target, in the page's order.

    Raises:
        UserError: a file is no plan or one of another configuration, or none is there.
    """
    found: dict[str, Plan] = {}
    for file in folder.glob("*.json"):
        try:
            one = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:  # no UTF-8, or no JSON
            raise UserError(f"{file}: not JSON ({error}); make it again with `python run.py plan --json`") from error
        if not isinstance(one, dict) or not one.keys() >= KEYS:
            raise UserError(f"{file}: no plan; make it again with `python run.py plan --json`")
        for key, wanted in (("global_batch", cfg.train.global_batch), ("steps", cfg.train.steps)):
            if one[key] != wanted:
                raise UserError(f"{file}: planned for train.{key}={one[key]}, not {wanted}; plan it again")
        found[one["target"]] = one
    if not found:
        raise UserError(f"{folder}: holds no plan; write TARGET.json there with `python run.py plan --json`")
    known = [target for target in TARGETS if target in found]
    return {target: found[target] for target in [*known, *sorted(found.keys() - set(known))]}


def make(cfg: Config) -> Plans:
    """Returns the plan of every target of the page; each is kept by `planner.make`."""
    from lw_jax.planning import planner

    plans = {}
    for target in TARGETS:
        print(f"planning {target}; minutes, the first time", file=sys.stderr, flush=True)
        plans[target] = dataclasses.asdict(planner.make(cfg, target))
    return plans


def chosen(plans: Plans) -> list[str]:
    """Returns what the planner takes on every target."""
    head = ("target", "strategy", "mesh", "remat", "batch", "peak GB", "limit GB", "s/step", "samples/s", "hours")
    rows = []
    for target, one in plans.items():
        best, limit, took = one["chosen"], f"{one['limit_bytes'] / 1e9:.1f}", f"{one['plan_seconds']:.0f}"
        if best is None:
            rows.append((target, "nothing fits", "", "", "", "", limit, "", "", "", took))
            continue
        speed = number(best["step_seconds"], 2), number(best["samples_per_second"], 1), number(best["hours"], 2)
        peak = f"{best['peak_bytes'] / 1e9:.1f}"
        rows.append((target, best["strategy"], best["mesh"], best["remat"], batch(best), peak, limit, *speed, took))
    return ["## What is chosen", "", *table((*head, "plan took s"), rows)]


def candidates(plans: Plans) -> list[str]:
    """Returns every candidate of every card, compiled beside the estimate."""
    lines = ["## Every candidate, compiled beside arithmetic"]
    for card, title in (CARDS | {"": "Others"}).items():
        mine = {target: one for target, one in plans.items() if _card_of(target) == card}
        if mine:
            lines += ["", f"### {title}", "", *_measured(mine, card)]
    return lines


def _card_of(target: str) -> str:
    """Returns the card whose table shows a target; "" is the table of all others."""
    return next((card for card, counts in COUNTS.items() if target in {f"{card}x{count}" for count in counts}), "")


def _measured(plans: Plans, card: str) -> list[str]:
    head = ("GPUs" if card else "target", "strategy", "mesh", "remat", "batch", "peak GB", "est.", "TFLOP", "est.")
    head += ("GB sent", "s/step", "est.", "samples/s", "")
    alone = plans.get(f"{card}x1", {}).get("candidates", [])
    rows = [
        (str(one["devices"]) if card else target, *_candidate(row, one["chosen"]))
        for target, one in plans.items()
        for row in one["candidates"]
        if row["peak_bytes"] and (one["devices"] == 1 or row == one["chosen"] or row not in alone)
    ]
    return table(head, rows) if rows else []


def _candidate(row: Mapping[str, Any], best: Mapping[str, Any] | None) -> tuple[str, ...]:
    verdict = "**chosen**" if row == best else ("" if row["fits"] else f"no: {short(row)}")
    return (
        *(row["strategy"], row["mesh"], row["remat"], batch(row)),
        *(number(row["peak_bytes"] / 1e9, 1), _beside(row, "peak_bytes", 1e9, 1)),
        *(number(row["flops"] / 1e12 if row["flops"] else None, 0), _beside(row, "flops", 1e12, 0)),
        number(row["collective_bytes"] / 1e9 if row["flops"] else None, 1),
        *(number(row["step_seconds"], 2), _beside(row, "step_seconds", 1, 2)),
        *(number(row["samples_per_second"], 1), verdict),
    )


def _beside(row: Mapping[str, Any], key: str, unit: float, digits: int) -> str:
    guess = (row["estimate"] or {}).get(key)
    if guess is None or not row[key]:
        return "-"
    return f"{guess / unit:.{digits}f} ({guess / row[key] - 1:+.0%})"


def refused(plans: Plans) -> list[str]:
    """Returns one line a reason with the candidates that it refused before anything was compiled."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for target, one in plans.items():
        for row in one["candidates"]:
            if not row["peak_bytes"]:
                reasons.setdefault(short(row), {}).setdefault(target, []).append(named(row))
    lines = []
    for reason, by_target in reasons.items():
        where = [f"{target}: {', '.join(names)}" for target, names in by_target.items()]
        lines.append(f"- {reason}: {'; '.join(where)}.")
    return ["### Refused before compiling", "", *lines] if lines else []


def agreement(plans: Plans) -> list[str]:
    """Returns how far arithmetic lies from the compiled figures, by strategy."""
    rows = [row for one in plans.values() if one["compiled"] for row in one["candidates"] if row["flops"]]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    body = []
    for name in [*names, "all"]:
        mine = [row for row in rows if name in (row["strategy"], "all")]
        body.append((name, str(len(mine)), *(_spread(mine, key) for key in ("peak_bytes", "flops", "step_seconds"))))
    return [
        "### How far arithmetic lies from the compiled figures: median (least to most)",
        "",
        *table(("strategy", "candidates", "peak", "FLOPs", "seconds"), body),
    ]


def _spread(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    found = [row["estimate"][key] / row[key] - 1 for row in rows if row["estimate"] and row[key]]
    if not found:
        return "-"
    return f"{statistics.median(found):+.0%} ({min(found):+.0%} to {max(found):+.0%})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a Markdown table with aligned columns; columns without words stand to the right."""
    body = [tuple(row) for row in rows]
    columns = list(zip(head, *body, strict=True))
    right = [not any(re.search("[a-wyzA-Z]", cell) for cell in column[1:]) for column in columns]
    widths = [max(3, *map(len, column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        cells = (
            f"{cell:>{width}}" if at_right else f"{cell:<{width}}"
            for cell, width, at_right in zip(row, widths, right, strict=True)
        )
        return f"| {' | '.join(cells)} |"

    rule = (
        "-" * (width + 1) + ":" if at_right else "-" * (width + 2)
        for width, at_right in zip(widths, right, strict=True)
    )
    return [line(head), f"|{'|'.join(rule)}|", *map(line, body)]


def number(value: float | None, digits: int) -> str:
    """Returns a number, or "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def layout(row: Mapping[str, Any]) -> str:
    """Returns a candidate's strategy with its mesh; a mesh that was never made is left out."""
    return row["strategy"] if "?" in row["mesh"] else f"{row['strategy']} {row['mesh']}"


def named(row: Mapping[str, Any]) -> str:
    """Returns a candidate's strategy, with the mesh where a number of GPUs has several of it."""
    return layout(row) if row["strategy"] == "tensor" else row["strategy"]


def batch(row: Mapping[str, Any]) -> str:
    """Returns a candidate's examples on a GPU and how often they are accumulated."""
    return f"{row['micro_batch']} x {row['accumulation']}"


def short(row: Mapping[str, Any]) -> str:
    """Returns why a candidate cannot be, without the remedy and what its row says already."""
    uneven = re.search(r"(\S+) \([\d, ]+\): dim \d+ \((\d+)\) does not divide mesh axis (\w+=\d+)", row["obstacle"])
    if uneven:
        return f"{uneven[2]} of {uneven[1]} is not divisible by {uneven[3]}"
    return row["obstacle"].partition(";")[0].rpartition(": ")[2]


if __name__ == "__main__":
    leave(main)
