"""Samples a second and memory of a wire's step over batch and slots, measured here or planned for an absent card.

    python benchmarks/sweep.py --config configs/embeddings.py --batches 4,8,16 --slots 8,16,32 --out runs/sweep
    python benchmarks/sweep.py --config configs/large.py --batches 16,32,64 --slots 8,32 --target h200x1 --out runs/h200

One device, the batch in one piece, nothing recomputed unless --config.compute.remat says so: points of scaling.py.
Writes DIR/sweep.json and DIR/sweep.png.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, scaling
from lw_jax.core import environment
from lw_jax.core.errors import leave
from lw_jax.report.figures import Line, Panel, draw_panels

SHOWN = {
    **{"slots": ("slots",), "batch": ("batch",), "s/step": ("step_seconds", ".4g")},
    **{"samples/s": ("samples_per_second", ".4g"), "peak GB": ("peak_bytes", ".3f", 1e-9)},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    parser.add_argument("--batches", type=common.numbers, required=True, metavar="N,N")
    parser.add_argument("--slots", type=common.numbers, required=True, metavar="N,N")
    parser.add_argument("--target", metavar="GPUS", help="planned for one such card, as h200x1")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of a point (default: 5)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(rest)
    target = None
    if args.target:
        environment.prepare_compiler(everywhere=True)
        from lw_jax.planning import gpus

        target = gpus.parse(args.target)
    rows = []
    for slots in args.slots:
        values = {"mesh.placement": "single", "compute.remat": "none"} | assignments | {"encoder.slots": str(slots)}
        for batch in args.batches:
            common.say(f"{slots} slots, batch {batch}")
            point = scaling.Point("batch", 1, 1, batch, batch)
            found = (
                scaling.plan(common.load(args.config, values), target, point)
                if target
                else scaling.ask(point, config=args.config, assignments=values, steps=args.repeats)
            )
            rows.append({"slots": slots, "batch": batch, "samples_per_second": found["examples_per_second"], **found})
    args.out.mkdir(parents=True, exist_ok=True)
    told = {"config": args.config, "assignments": assignments, "target": args.target, "rows": rows}
    (args.out / "sweep.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    draw(rows, title=f"{Path(args.config).name}, {rows[0]['kind']}, {rows[0]['target']}").savefig(
        args.out / "sweep.png"
    )
    print(common.columns(rows, SHOWN))
    return 0


def draw(rows: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Returns samples a second and memory over the batch, one line for each number of slots."""
    drawn = [row for row in rows if None not in (row["peak_bytes"], row["samples_per_second"])]  # fits, and was timed
    panels = []
    for key, name, scale in (("samples_per_second", "samples a second", 1), ("peak_bytes", "peak memory, GB", 1e-9)):
        lines = []
        for colour, slots in enumerate(sorted({row["slots"] for row in drawn})):
            own = sorted((row["batch"], row[key] * scale) for row in drawn if row["slots"] == slots)
            lines.append(Line(f"{slots} slots", *map(list, zip(*own, strict=True)), colour=colour))
        panels.append(Panel(name, "", lines, is_logarithmic=False))
    figure = draw_panels(panels, label="samples a step")
    figure.suptitle(title)
    return figure


if __name__ == "__main__":
    leave(main)
