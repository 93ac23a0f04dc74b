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

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core import config, environment
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError, leave
from lw_jax.core.files import write_whole
from lw_jax.report import scaling as report

if TYPE_CHECKING:
    from lw_jax.planning.gpus import Target  # imports JAX

FILE = "scaling.json"
SHARES = 8  # of the global batch: what one device of a whole node takes, and what weak scaling gives each
LENGTHS = (128, 512, 1024)
KEY = ("kind", "scaling", "target")
EMPTY = ("accumulation", "remat", "weights_bytes", "optimizer_bytes", "activation_bytes", "peak_bytes", "peak_from")
EMPTY += ("mfu", "obstacle")  # of a row that has no such figure
ONE_MESH = ("replicate", "fsdp", "tensor")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Point:
    """One step to plan or to measure."""

    scaling: str  # "weak" | "strong" | "length" | "batch"
    devices: int
    length: int  # of an example, in the recipe's units
    global_batch: int
    micro_batch: int = 0  # 0: the largest that fits


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the folder of scaling.json")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--planned", metavar="GPUS", help="up to so many, as h100x8 or 2xh100x4")
    kinds.add_argument("--measured", action="store_true", help="on this machine's devices")
    parser.add_argument("--estimate", action="store_true", help="planned by arithmetic, nothing is compiled")
    parser.add_argument("--lengths", type=common.numbers, default=LENGTHS, metavar="N,N", help="default: 128,512,1024")
    parser.add_argument(
        "--batches", type=common.numbers, default=(), metavar="N,N", help="measured: also these, at one device"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps of a point (default: 10)")
    args = parser.parse_args(rest)
    if args.measured and args.estimate or args.planned and args.batches:
        parser.error("--estimate goes with --planned, --batches with --measured")
    if args.planned:
        environment.prepare_compiler(everywhere=True)
        from lw_jax.planning import gpus

        cfg, target = common.load(args.config, assignments), gpus.parse(args.planned)
        wanted = points(outline(cfg), target.devices, args.lengths)
        find = functools.partial(plan, cfg, target, estimate=args.estimate)
    else:
        spec = {"config": args.config, "assignments": assignments}
        machine = common.apart("scaling.here", **spec)
        wanted = points(machine, machine["devices"], args.lengths)
        wanted += [Point("batch", 1, machine["length"], micro, micro) for micro in args.batches]
        find = functools.partial(ask, steps=args.steps, **spec)
    rows = [row | {"config": args.config} for row in each(wanted, find)]
    write(Path(args.workdir), rows)
    print(table(rows))
    return 0


def each(wanted: Iterable[Point], find: Callable[[Point], Row]) -> Iterator[Row]:
    """Yields the row of every point; points of two scalings may share a step."""
    found: dict[Point, Row] = {}
    for point in wanted:
        step = dataclasses.replace(point, scaling="")
        if step not in found:
            common.say(str(point))
            found[step] = find(point)
        yield found[step] | {"scaling": point.scaling}


def ask(point: Point, **words: Any) -> Row:
    """Returns `measure` of a point, by a process of its own."""
    return common.apart("scaling.measure", point=dataclasses.asdict(point), **words)


def outline(cfg: Config) -> Row:
    """Returns the unit of the recipe's examples, how many an example has, and the global batch."""
    unit, length = _make(cfg).unit
    return {"unit": unit, "length": length, "global_batch": cfg.train.global_batch}


def here(config: str, assignments: Mapping[str, str]) -> Row:
    """Returns what `outline` does, and the number of devices."""
    import jax

    return outline(common.load(config, assignments)) | {"devices": len(jax.devices())}


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
        mesh = dataclasses.replace(mesh, placement="replicate", model=1)
    if mesh.placement in ONE_MESH:  # on the first devices
        mesh = dataclasses.replace(mesh, data=point.devices // mesh.model)
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


def plan(cfg: Config, target: "Target", point: Point, *, estimate: bool = False) -> Row:
    """Returns the row of one point on a part of a node of the target, or on whole nodes; no figures if nothing fits.

    Raises UserError for devices that are no whole nodes.
    """
    from lw_jax.planning import planner

    own, count = at(cfg, point), min(point.devices, target.per_host)
    if point.devices % count:
        raise UserError(f"--planned {target.name}: {point.devices} devices are no whole nodes of {count}")
    part = dataclasses.replace(target, per_host=count, hosts=point.devices // count)
    found = planner.make(own, part.name, estimate=estimate)
    card = target.card.name + (f", {target.per_host} a node" if target.hosts > 1 else "")
    if (best := found.chosen) is None:
        return _row(own, point, "planned", card, obstacle=found.why)
    names = ("micro_batch", "accumulation", "remat", "optimizer_bytes", "activation_bytes", "peak_bytes")
    figures = {name: getattr(best, name) for name in names}
    figures |= {"weights_bytes": best.weights_bytes + best.trainable_bytes}
    figures |= {"peak_from": "compiled" if found.compiled else "arithmetic"}
    return _row(own, point, "planned", card, best.step_seconds, **figures)


def measure(config: str, assignments: Mapping[str, str], point: Row, steps: int) -> Row:
    """Returns the row of one point on this process's first devices; without figures where nothing fits."""
    import jax

    from lw_jax.benchmarking.measurement import Measured
    from lw_jax.planning import gpus, planner, roofline
    from lw_jax.training.out_of_memory import OutOfMemory
    from sharding.errors import PlacementError

    place, device = Point(**point), jax.devices()[0]
    own, card = at(common.load(config, assignments), place), gpus.of_device(device)
    try:
        found = Measured(*planner.resolve_auto(own), repeats=steps)
        (told,) = found.step()
    except (UserError, PlacementError, OutOfMemory) as error:
        return _row(own, place, "measured", device.device_kind, obstacle=str(error))
    needs, seconds = found.needs, told.seconds
    assert needs and seconds and told.flops, "the step was measured"
    figures = {"micro_batch": needs.micro_batch, "accumulation": needs.accumulation, "remat": found.cfg.compute.remat}
    figures |= {"weights_bytes": needs.weights + needs.trainable, "optimizer_bytes": needs.optimizer}
    figures |= {"activation_bytes": needs.activations, "peak_bytes": told.peak_bytes, "peak_from": told.peak_from}
    figures |= {"step_seconds_least": seconds.least, "step_seconds_most": seconds.most, "steps": steps}
    if card:
        peak = card.peak[roofline.ARITHMETIC[found.ceilings.dtype]]
        figures["mfu"] = told.flops / (seconds.median * place.devices * peak)
    return _row(own, place, "measured", device.device_kind, seconds.median, of_matmul=told.of_matmul, **figures)


def _row(cfg: Config, point: Point, kind: str, target: str, seconds: float | None = None, **figures: Any) -> Row:
    from lw_jax.core import tree

    unit, rate = outline(cfg)["unit"], point.global_batch / seconds if seconds else None
    row = {"kind": kind, "target": target, **dataclasses.asdict(point), "unit": unit}
    row |= {"parameters": tree.count(_make(cfg).abstract.trainable)}
    row |= {"step_seconds": seconds, "examples_per_second": rate}
    row |= {"tokens_per_second": rate * point.length if rate and unit == "tokens" else None}
    return row | dict.fromkeys(EMPTY) | figures


def write(workdir: Path, rows: Sequence[Row]) -> None:
    """Writes the rows beside those of other kinds, scalings and cards; raises UserError where the file is none."""
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
    parts = [f"{rows[0]['kind']}, {rows[0]['target']}"]
    for name, (title, note) in report.KINDS.items():
        if own := [row for row in rows if row["scaling"] == name]:
            shown = report.table(own)
            parts.append(f"{title}, {note}\n{common.table(shown.head, shown.rows)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    leave(main)
