"""Holds the plan against this machine: peak memory and seconds a step, planned and measured, at several sizes.

    python benchmarks/planned.py                                      # one GPU of 80 GB: six points, minutes
    python benchmarks/planned.py --config configs/smoke.py --points both:4:none --json    # anywhere

A point is READERS:MICRO_BATCH:REMAT, READERS one name of the configuration or "both". Each runs in a process of its
own (a device's peak cannot be set back) on random weights and a random batch at the configuration's limits, two
micro-batches a step. With the ceilings that the machine reaches beside it, in place of the assumed shares of the data
sheet's figures, the seconds are predicted again ("calibrated"). A device that tells no memory, as a CPU, is timed only.
Ends with code 1 where a measured peak is more than 3 % off, or a calibrated time more than 10 %.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core.config import REMATS, Config
from lw_jax.core.errors import UserError, leave

POINTS = ("both:8:none", "both:16:none", "both:32:none", "both:32:full", "llama:32:none", "qwen:16:none")
PEAK, SECONDS = 0.03, 0.10  # relative differences that pass
ACCUMULATED = 2
SHOWN = {
    **{"point": ("point",), "planned GB": ("planned_bytes", ".3f", 1e-9), "peak GB": ("peak_bytes", ".3f", 1e-9)},
    **{"GB off": ("peak_off", "+.1%"), "predicted s": ("predicted_seconds", ".3f")},
    **{
        "calibrated s": ("calibrated_seconds", ".3f"),
        "measured s": ("seconds", ".3f"),
        "s off": ("seconds_off", "+.1%"),
    },
    **{"matmul": ("matmul", ".0%"), "bandwidth": ("bandwidth", ".0%")},  # reached, of the data sheet's figures
    **{"on": ("device",), "jax": ("jax",)},
}

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv, "configs/large.py")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="READERS:MICRO_BATCH:REMAT")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each point (default: 5)")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(rest)
    spec, rows = {"config": args.config, "assignments": assignments, "steps": args.steps}, []
    for point in args.points:
        common.say(point)
        rows.append(common.apart("planned.measure", **spec, point=point))
    print(json.dumps({"points": rows}, indent=2) if args.json else common.columns(rows, SHOWN))
    return int(any(map(is_off, rows)))


def measure(config: str, assignments: dict[str, str], point: str, steps: int) -> Row:
    """Returns what is planned for a point and what it takes; raises UserError where it names no reader or no size."""
    import jax

    from lw_jax.benchmarking.measurement import Measured
    from lw_jax.planning import hardware, hlo_counts, planner, roofline

    own = at(common.load(config, assignments), point)
    found = Measured(*planner.resolve_auto(own), repeats=steps)
    (told,), target, reached = found.step(), hardware.here(own).target, found.ceilings
    needs, seconds = found.needs, told.seconds
    assert needs and seconds, "the step was measured"
    row: Row = {"point": point, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    row |= {"planned_bytes": needs.peak, "peak_bytes": told.peak_bytes if told.peak_from == "device" else None}
    row |= {"seconds": seconds.median}
    if target:
        counted, card = hlo_counts.analyse(needs.programs["step"][0].as_text()), target.card
        row["predicted_seconds"] = roofline.predict(counted, target).total
        row["matmul"] = reached.matmul / card.peak[roofline.ARITHMETIC[reached.dtype]]
        row["bandwidth"] = reached.bandwidth / card.bandwidth
        roofline.MATMUL_FRACTION, roofline.BANDWIDTH_FRACTION = row["matmul"], row["bandwidth"]
        row["calibrated_seconds"] = roofline.predict(counted, target).total
    row["peak_off"] = _off(row["peak_bytes"], row["planned_bytes"])
    return row | {"seconds_off": _off(row["seconds"], row.get("calibrated_seconds"))}


def at(cfg: Config, point: str) -> Config:
    words, known = point.split(":"), ["both", *cfg.llms]
    if len(words) != 3 or words[0] not in known or not words[1].isdigit() or words[2] not in REMATS["latentwire"]:
        raise UserError(f"point {point!r}: write READERS:MICRO_BATCH:REMAT, READERS one of {', '.join(known)}.")
    readers, micro, remat = words[0], int(words[1]), words[2]
    llms = cfg.llms if readers == "both" else {readers: cfg.llms[readers]}
    train = dataclasses.replace(cfg.train, global_batch=ACCUMULATED * micro, micro_batch=micro)
    compute, mesh = dataclasses.replace(cfg.compute, remat=remat), dataclasses.replace(cfg.mesh, placement="single")
    return dataclasses.replace(cfg, llms=llms, train=train, compute=compute, mesh=mesh)


def is_off(row: Mapping[str, Any]) -> bool:
    return abs(row["peak_off"] or 0.0) > PEAK or abs(row["seconds_off"] or 0.0) > SECONDS


def _off(found: float | None, planned: float | None) -> float | None:
    return None if found is None or planned is None else found / planned - 1


if __name__ == "__main__":
    leave(main)
