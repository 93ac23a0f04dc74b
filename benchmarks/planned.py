"""Holds the plan against this machine: peak memory and seconds a step, planned and measured, at several sizes.

    python benchmarks/planned.py                                      # one GPU of 80 GB: six points, minutes
    python benchmarks/planned.py --config configs/smoke.py --points both:4:none --json    # anywhere

A point is READERS:MICRO_BATCH:REMAT, READERS one name of the configuration or "both". Each runs in a process of its
own (a device's peak cannot be set back) on random weights and a random batch at the configuration's limits, two
micro-batches a step. First the machine's ceilings are measured: with them in place of the assumed shares of the data
sheet's figures the seconds are predicted again ("calibrated"). A device that tells no memory, as a CPU, is timed only.
Ends with code 1 where a measured peak is more than 3 % off, or a calibrated time more than 10 %.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.common import number
from lw_jax.core import environment
from lw_jax.core.config import REMATS, Config
from lw_jax.core.errors import UserError, leave

POINTS = ("both:8:none", "both:16:none", "both:32:none", "both:32:full", "llama:32:none", "qwen:16:none")
PEAK, SECONDS = 0.03, 0.10  # relative differences that pass
ACCUMULATED = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/large.py", help="default: configs/large.py")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="READERS:MICRO_BATCH:REMAT")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each point (default: 5)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a child: "ceilings", or a point
    parser.add_argument("--shares", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only:
        environment.reserve_memory()
        environment.hide_idle_cuda()
        cfg = common.load(args.config, {})
        found = ceilings() if args.only == "ceilings" else run(cfg, args.only, steps=args.steps, shares=args.shares)
        print(json.dumps(found))
        return 0
    words = ["--config", args.config, "--steps", str(args.steps)]
    shares = common.child([__file__, *words, "--only", "ceilings"])
    rows = []
    for point in args.points:
        print(f"{point} ...", file=sys.stderr, flush=True)
        rows.append(common.child([__file__, *words, "--only", point, "--shares", json.dumps(shares)]))
    print(json.dumps({"ceilings": shares, "points": rows}, indent=2) if args.json else table(shares, rows))
    return int(any(map(is_off, rows)))


def ceilings() -> dict[str, Any]:
    """Returns the device's kind and the shares of its data sheet's figures that it reaches; {} shares if unknown."""
    import jax

    from lw_jax.benchmarking import timing
    from lw_jax.planning import gpus

    device = jax.devices()[0]
    found: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    card = gpus.of_device(device)
    if card is None:
        return found
    reached = timing.ceilings("bfloat16")
    return found | {
        "matmul": reached.matmul / card.peak["bf16"],
        "bandwidth": reached.bandwidth / card.bandwidth,
    }


def run(cfg: Config, point: str, *, steps: int, shares: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is planned for a point and what it takes.

    Raises:
        UserError: the point's words name no reader or no size.
    """
    from lw_jax import recipes
    from lw_jax.benchmarking import timing
    from lw_jax.planning import hardware, hlo_counts, roofline
    from lw_jax.training import memory, out_of_memory
    from lw_jax.training.step_spec import StepSpec
    from sharding import placement

    own, micro = at(cfg, point)
    recipe = recipes.make(own, placement.place("single", recipes.reader_bytes(own)), outline=True)
    program, widths = StepSpec(own, recipe), recipe.batch_widths()
    needs = memory.measure(program, widths, ACCUMULATED)
    target = hardware.here(own).target
    step = needs.programs["step"][0]
    row = {"point": point, "planned_bytes": needs.peak, "micro_batch": micro, "remat": own.compute.remat}
    if target:
        counted = hlo_counts.analyse(step.as_text())
        row["predicted_seconds"] = roofline.predict(counted, target).total
        roofline.MATMUL_FRACTION, roofline.BANDWIDTH_FRACTION = shares["matmul"], shares["bandwidth"]
        row["calibrated_seconds"] = roofline.predict(counted, target).total
    with out_of_memory.detect():
        batch = timing.fill(program.batch(widths, ACCUMULATED))
        row["seconds"] = statistics.median(timing.steps(program, step, batch, repeats=steps))
        row["peak_bytes"] = timing.peak_bytes()
    return row


def at(cfg: Config, point: str) -> tuple[Config, int]:
    words = point.split(":")
    known = ["both", *cfg.llms]
    if len(words) != 3 or words[0] not in known or not words[1].isdigit() or words[2] not in REMATS["latentwire"]:
        raise UserError(f"point {point!r}: write READERS:MICRO_BATCH:REMAT, READERS one of {', '.join(known)}.")
    readers, micro, remat = words[0], int(words[1]), words[2]
    llms = cfg.llms if readers == "both" else {readers: cfg.llms[readers]}
    train = dataclasses.replace(cfg.train, global_batch=ACCUMULATED * micro, micro_batch=micro)
    compute = dataclasses.replace(cfg.compute, remat=remat)
    return dataclasses.replace(cfg, llms=llms, train=train, compute=compute), micro


def is_off(row: Mapping[str, Any]) -> bool:
    peak, seconds = _off(row["peak_bytes"], row["planned_bytes"]), _off(row["seconds"], row.get("calibrated_seconds"))
    return abs(peak or 0.0) > PEAK or abs(seconds or 0.0) > SECONDS


def _off(found: float | None, planned: float | None) -> float | None:
    return None if found is None or planned is None else found / planned - 1


def table(shares: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    reached = [f"{name} {shares[name]:.0%}" for name in ("matmul", "bandwidth") if name in shares]
    of_sheet = f"of the data sheet's figures: {', '.join(reached)}" if reached else "ceilings not known"
    head = ("point", "planned GB", "peak GB", "off", "predicted s", "calibrated s", "measured s", "off")
    cells = []
    for row in rows:
        peak, planned, seconds, calibrated = (
            row.get(key) for key in ("peak_bytes", "planned_bytes", "seconds", "calibrated_seconds")
        )
        cells.append(
            (
                *(row["point"], number(planned, ".3f", 1e-9), number(peak, ".3f", 1e-9)),
                *(number(_off(peak, planned), "+.1%"), number(row.get("predicted_seconds"), ".3f")),
                *(number(calibrated, ".3f"), number(seconds, ".3f"), number(_off(seconds, calibrated), "+.1%")),
            )
        )
    return f"{shares['device']}, jax {shares['jax']}; {of_sheet}\n\n{common.table(head, cells)}"


if __name__ == "__main__":
    environment.leave_out_torch()
    leave(main)
