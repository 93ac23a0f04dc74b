"""Writes how a step scales over devices and lengths to WORKDIR/scaling.json, measured here or planned for absent cards.

    python benchmarks/scaling.py --config configs/ttt/ttt_125m.py --workdir runs/x --planned h100x8
    python benchmarks/scaling.py --config configs/ttt/ttt_125m.py --workdir runs/x --measured --batches 16,32,64,128

Weak: each device keeps an eighth of train.global_batch. Strong: all of them share train.global_batch. Length: other
lengths of text, as many tokens a step. Batch (--batches): one device, the batch in one piece. Devices are 1, 2, 4 ...
Data are replicated over them where the configuration leaves the placement open. Planned rows are compiled for the card
and predicted. Measured ones are timed on random weights and tokens, each point in a process of its own (a device's
peak cannot be set back); try it anywhere with --config configs/ttt/ttt_smoke.py and JAX_NUM_CPU_DEVICES=8. Rows of
the same kind, scaling and card are replaced, all others stay. `python run.py report --workdir WORKDIR` shows them.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, planned
from benchmarks.common import number
from lw_jax.core import config, environment
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave
from lw_jax.core.files import write_whole

FILE = "scaling.json"
SHARES = 8  # of the global batch: what one device of a whole node takes, and what weak scaling gives each
LENGTHS = (128, 512, 1024)
KEY = ("kind", "scaling", "target")
UNBOUNDED = 1 << 62  # bytes, where the runtime tells no memory

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Point:
    """One step to plan or to measure."""

    scaling: str  # "weak" | "strong" | "length" | "batch"
    devices: int
    length: int  # of an example, in the recipe's units
    global_batch: int
    micro_batch: int = 0  # 0: the largest that fits

    @property
    def step(self) -> tuple[int, ...]:
        """Returns what decides the step: points of two scalings may share it."""
        return self.devices, self.length, self.global_batch, self.micro_batch


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args, assignments = _parse(words)
    if not args.measured:
        environment.prepare_compiler(everywhere=True)
    elif args.only:
        environment.reserve_memory()
        environment.hide_idle_cuda()
    cfg = common.load(args.config, assignments) if args.only or args.planned else None
    if args.only and cfg:
        point = None if args.only == "here" else Point(**json.loads(args.only))
        print(json.dumps(measure(cfg, point, steps=args.steps) if point else here(cfg)))
        return 0
    if cfg:
        rows = plan_all(cfg, args.planned, lengths=args.lengths, estimate=args.estimate)
    else:
        rows = measure_all(lambda only: _child([*words, "--only", only]), lengths=args.lengths, batches=args.batches)
    rows = [row | {"config": args.config} for row in rows]
    write(Path(args.workdir), rows)
    print(table(rows))
    return 0


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    parser, assignments, rest = common.parser(__doc__, words)
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the folder of scaling.json")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--planned", metavar="GPUS", help="up to so many, as h100x8")
    kinds.add_argument("--measured", action="store_true", help="on this machine's devices")
    parser.add_argument("--estimate", action="store_true", help="planned by arithmetic, nothing is compiled")
    parser.add_argument("--lengths", type=common.numbers, default=LENGTHS, metavar="N,N", help="default: 128,512,1024")
    parser.add_argument(
        "--batches", type=common.numbers, default=(), metavar="N,N", help="measured: also these, at one device"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps of a point (default: 10)")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a child: "here", or a point
    return parser.parse_args(rest), assignments


def _child(words: Sequence[str]) -> Row:
    print("...", words[-1], file=sys.stderr, flush=True)
    return common.child([__file__, *words])


def plan_all(cfg: Config, target: str, *, lengths: Iterable[int], estimate: bool) -> list[Row]:
    """Returns the planned rows of 1, 2, 4 ... cards up to the target's; raises UserError for an unknown target."""
    from lw_jax.planning import gpus

    wanted = gpus.parse(target)
    found: dict[tuple[int, ...], Row] = {}
    rows = []
    for point in points(outline(cfg), wanted.devices, lengths):
        if point.step not in found:
            print("...", f"{wanted.card.name}x{point.devices}", point, file=sys.stderr, flush=True)
            found[point.step] = plan_one(cfg, point, wanted.card.name, estimate=estimate)
        rows.append(found[point.step] | {"scaling": point.scaling})
    return rows


def measure_all(ask: Any, *, lengths: Iterable[int], batches: Iterable[int]) -> list[Row]:
    """Returns the measured rows; `ask` gives a child's answer to "here" or to a point as JSON."""
    machine = ask("here")
    found: dict[tuple[int, ...], Row] = {}
    rows = []
    sweep = [Point("batch", 1, machine["length"], micro, micro) for micro in batches]
    for point in [*points(machine, machine["devices"], lengths), *sweep]:
        if point.step not in found:
            found[point.step] = ask(json.dumps(dataclasses.asdict(point)))
        row = found[point.step] | {"scaling": point.scaling}
        if "matmul" in machine and row["mfu"] is not None:
            row |= {"of_matmul": row["mfu"] / machine["matmul"]}
        rows.append(row)
    return rows


def outline(cfg: Config) -> Row:
    """Returns the unit of the recipe's examples, how many an example has, and the global batch."""
    unit, length = _make(cfg).unit
    return {"unit": unit, "length": length, "global_batch": cfg.train.global_batch}


def here(cfg: Config) -> Row:
    """Returns what `outline` does, the number of devices, and this card's ceilings where it is known."""
    import jax

    if jax.process_count() > 1:
        raise UserError(f"{jax.process_count()} processes: measure in one, on the devices of one machine")
    return planned.ceilings() | outline(cfg) | {"devices": len(jax.devices())}


def points(told: Mapping[str, Any], devices: int, lengths: Iterable[int]) -> list[Point]:
    """Returns every point on 1, 2, 4 ... `devices`; lengths only where examples are counted in tokens.

    Raises:
        UserError: the global batch cannot be divided by SHARES, or holds no whole number of windows of a length.
    """
    batch, own = told["global_batch"], told["length"]
    if batch % SHARES:
        raise UserError(f"config.train.global_batch = {batch}: it must be a multiple of {SHARES}, a device's share")
    counts = [1 << n for n in range(devices.bit_length())]
    weak = [Point("weak", count, own, batch // SHARES * count) for count in counts]
    strong = [Point("strong", count, own, batch) for count in counts]
    if told["unit"] != "tokens":
        return weak + strong
    for length in lengths:
        if batch * own % (length * counts[-1]):
            raise UserError(
                f"--lengths {length}: {batch} x {own} tokens a step make no equal number of windows for {counts[-1]} "
                "devices; name other lengths, or change train.global_batch"
            )
    return weak + strong + [Point("length", counts[-1], length, batch * own // length) for length in lengths]


def at(cfg: Config, point: Point) -> Config:
    """Returns the configuration of one point; raises UserError where the recipe cannot have its length."""
    from lw_jax.core import validation

    train = dataclasses.replace(cfg.train, global_batch=point.global_batch, micro_batch=point.micro_batch)
    mesh, text = cfg.mesh, cfg.ttt
    if mesh.placement == "auto":
        mesh = dataclasses.replace(mesh, placement="replicate", data=point.devices, model=1)
    if outline(cfg)["length"] != point.length:
        text = dataclasses.replace(text, length=point.length // text.segments)
    own = dataclasses.replace(cfg, train=train, mesh=mesh, ttt=text)
    validation.validate(own)
    if outline(own)["length"] != point.length:
        raise UserError(f"--lengths {point.length}: it must be a multiple of config.ttt.segments = {text.segments}")
    return own


def _make(cfg: Config) -> Any:
    from lw_jax import recipes

    return recipes.outline(config.with_remat(cfg, "none"))


def plan_one(cfg: Config, point: Point, card: str, *, estimate: bool) -> Row:
    """Returns the row of one point on absent cards; without figures where nothing fits."""
    from lw_jax.planning import planner

    own = at(cfg, point)
    found = planner.make(own, f"{card}x{point.devices}", estimate=estimate)
    best = found.chosen
    row = _row(own, point, "planned", card)
    if best is None:
        return row | {"obstacle": found.why}
    told = {name: getattr(best, name) for name in ("strategy", "remat", "micro_batch", "accumulation", "peak_bytes")}
    told |= {name: getattr(best, name) for name in ("optimizer_bytes", "activation_bytes", "collective_bytes")}
    told |= {"weights_bytes": best.weights_bytes + best.trainable_bytes}
    told |= {"peak_from": "compiled" if found.compiled else "arithmetic"}
    return row | told | _pace(point, row["unit"], best.step_seconds)


def measure(cfg: Config, point: Point, *, steps: int) -> Row:
    """Returns the row of one point on this process's first devices; without figures where nothing fits."""
    import jax

    from lw_jax import recipes
    from lw_jax.benchmarking import timing
    from lw_jax.planning import gpus, hardware, placement_search, workload
    from lw_jax.training import memory_limit, out_of_memory
    from lw_jax.training.step_spec import StepSpec

    devices = jax.devices()[: point.devices]
    own, card = at(cfg, point), gpus.of_device(devices[0])
    room = memory_limit.local(own)
    if room is None and own.compute.remat == "auto":  # there is no reason to recompute
        own = config.with_remat(own, "none")
    on = hardware.Hardware(
        devices, room or memory_limit.MemoryLimit(UNBOUNDED, 1.0), gpus.Target(card, point.devices) if card else None
    )
    tried = placement_search.choose(own, on)
    best, row = placement_search.pick(tried), _row(own, point, "measured", devices[0].device_kind)
    if best is None or best.needs is None or best.placement is None:
        return row | {"obstacle": "; ".join(one.obstacle for one in tried)}
    if "step" not in best.needs.programs:
        raise UserError(f"config.mesh.placement = {best.strategy!r}: measure one whose step is one program: replicate")
    recipe = recipes.make(config.with_remat(own, best.remat), best.placement, outline=True)
    program, needs = StepSpec(config.with_remat(own, best.remat), recipe), best.needs
    ids = getattr(getattr(recipe, "model", None), "vocab", 0)  # equal tokens would meet in one row of a learning table
    with out_of_memory.detect():
        batch = timing.fill(program.batch(recipe.batch_widths(), needs.accumulation), ids=ids)
        taken = timing.steps(program, needs.programs["step"][0], batch, repeats=steps)
        peak = timing.peak_bytes()
    told = {"strategy": best.strategy, "remat": best.remat}
    told |= {"micro_batch": needs.micro_batch, "accumulation": needs.accumulation}
    told |= {"weights_bytes": needs.weights + needs.trainable, "optimizer_bytes": needs.optimizer}
    told |= {"activation_bytes": needs.activations, "collective_bytes": best.collective_bytes}
    told |= {"peak_bytes": needs.peak if peak is None else peak, "peak_from": "compiled" if peak is None else "device"}
    seconds = statistics.median(taken)
    told |= {"step_seconds_least": min(taken), "step_seconds_most": max(taken), "steps": steps}
    work = workload.step_flops(own)
    told |= {"mfu": work / (seconds * point.devices * card.peak["bf16"]) if card else None}
    return row | told | _pace(point, row["unit"], seconds)


def _row(cfg: Config, point: Point, kind: str, target: str) -> Row:
    import jax

    shapes = jax.tree.leaves(_make(cfg).abstract().trainable)
    empty = ("strategy", "remat", "accumulation", "step_seconds", "tokens_per_second", "peak_bytes", "weights_bytes")
    empty += ("optimizer_bytes", "activation_bytes", "collective_bytes", "peak_from", "mfu", "obstacle")
    row = {"kind": kind, "target": target, **dataclasses.asdict(point), "unit": outline(cfg)["unit"]}
    return row | {"parameters": sum(math.prod(leaf.shape) for leaf in shapes)} | dict.fromkeys(empty)


def _pace(point: Point, unit: str, seconds: float | None) -> Row:
    rate = point.global_batch / seconds if seconds else None
    tokens = rate * point.length if rate and unit == "tokens" else None
    return {"step_seconds": seconds, "examples_per_second": rate, "tokens_per_second": tokens}


def write(workdir: Path, rows: Sequence[Row]) -> None:
    """Writes the rows beside those of other kinds, scalings and cards.

    Raises:
        UserError: the file there is no list of rows.
    """
    file = workdir / FILE
    try:
        kept = json.loads(file.read_text("utf-8")) if file.exists() else []
        replaced = {tuple(row[key] for key in KEY) for row in rows}
        kept = [row for row in kept if tuple(row[key] for key in KEY) not in replaced]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: {error!r}; it must be as this script wrote it: remove it") from error
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps([*kept, *rows], indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    head = ("scaling", "devices", "length", "batch", "micro x acc", "remat", "s/step", "tokens/s", "peak GB", "")
    cells = [
        (
            *(row["scaling"], str(row["devices"]), str(row["length"]), str(row["global_batch"])),
            f"{row['micro_batch']} x {number(row['accumulation'], 'd')}",
            *(row["remat"] or "-", number(row["step_seconds"], ".4f"), number(row["tokens_per_second"], ",.0f")),
            *(number(row["peak_bytes"], ".3f", 1e-9), row["obstacle"] or number(row["mfu"], ".1%").replace("-", "")),
        )
        for row in rows
    ]
    return f"{rows[0]['kind']}, {rows[0]['target']}\n{common.table(head, cells)}"


if __name__ == "__main__":
    environment.leave_out_torch()
    leave(main)
