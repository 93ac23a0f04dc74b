"""Samples a second and memory of a wire's step over batch and slots, measured here or planned for an absent card.

    python benchmarks/sweep.py --config configs/embeddings.py --batches 4,8,16 --slots 8,16,32 --out runs/sweep
    python benchmarks/sweep.py --config configs/large.py --batches 16,32,64 --slots 8,32 --target h200x1 --out runs/h200

One device, the batch in one piece, nothing recomputed unless --config.compute.remat says so. Each measured point is a
`run.py bench` of its own (a device's peak cannot be set back). Writes DIR/sweep.json and DIR/sweep.png.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core.errors import UserError, leave
from lw_jax.report.figures import COLOURS

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    parser.add_argument("--batches", type=common.numbers, required=True, metavar="N,N")
    parser.add_argument("--slots", type=common.numbers, required=True, metavar="N,N")
    parser.add_argument("--target", metavar="GPUS", help="planned for one such card, as h200x1")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of a point (default: 5)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(rest)
    words = common.flags(assignments)
    rows = []
    for slots in args.slots:
        for batch in args.batches:
            print(f"{slots} slots, batch {batch} ...", file=sys.stderr, flush=True)
            own = ["--config", args.config, *words, *_at(batch, slots, assignments)]
            found = _planned(own, args.target) if args.target else _measured(own, args.out / "point", args.repeats)
            rows.append({"slots": slots, "batch": batch, **found})
    args.out.mkdir(parents=True, exist_ok=True)
    told = {"config": args.config, "assignments": assignments, "target": args.target, "rows": rows}
    (args.out / "sweep.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    draw(rows, title=f"{Path(args.config).name}, {rows[0]['device']}").savefig(args.out / "sweep.png")
    print(table(rows))
    return 0


def draw(rows: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Returns samples a second and memory over the batch, one line for each number of slots.

    Rows: {"slots", "batch", "samples_per_second", "peak_bytes"}, the last two None where the batch does not fit.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for slots, colour in zip(sorted({row["slots"] for row in rows}), COLOURS, strict=False):
        line = sorted((row for row in rows if row["slots"] == slots), key=lambda row: row["batch"])
        line = [row for row in line if row["peak_bytes"] is not None]
        batches, label = [row["batch"] for row in line], f"{slots} slots"
        speed.plot(batches, [row["samples_per_second"] for row in line], "o-", color=colour, label=label)
        memory.plot(batches, [row["peak_bytes"] / 1e9 for row in line], "o-", color=colour, label=label)
    for panel, unit in ((speed, "samples a second"), (memory, "peak memory of the device, GB")):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.set(xlabel="samples a step (logarithmic)", ylabel=unit)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    speed.legend()
    figure.suptitle(title)
    return figure


def _at(batch: int, slots: int, given: Any) -> list[str]:
    """Returns the flags of a point; what the command line sets itself stands."""
    own = {"train.global_batch": batch, "train.micro_batch": batch, "encoder.slots": slots}
    own |= {"mesh.placement": "single", "compute.remat": "none"}
    return common.flags({path: value for path, value in own.items() if path not in given})


def _run(words: Sequence[str]) -> tuple[int, str]:
    command = [sys.executable, str(common.ROOT / "run.py"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


def _measured(words: Sequence[str], workdir: Path, repeats: int) -> Row:
    flags = ["--parts", "step", "--repeats", str(repeats), "--json", "--workdir", str(workdir)]
    code, text = _run(["bench", *words, *flags])
    if code:
        raise UserError(f"{' '.join(words)}: bench ended with code {code}; its error is above")
    told = json.loads(text)
    (row,) = told["rows"]
    wanted = ("samples_per_second", "of_matmul", "peak_bytes", "peak_from")
    return {"device": told["device"], "seconds": row["seconds"]["median"]} | {key: row[key] for key in wanted}


def _planned(words: Sequence[str], target: str) -> Row:
    """Returns the plan's figures; without any where the point does not fit."""
    code, text = _run(["plan", *words, "--target", target, "--json"])
    if code not in (0, 3):
        raise UserError(f"{' '.join(words)}: plan ended with code {code}; its error is above")
    best = json.loads(text)["chosen"]
    if best is None:
        return {"device": f"planned for {target}", "seconds": None, "samples_per_second": None, "peak_bytes": None}
    told = {"device": f"planned for {target}", "seconds": best["step_seconds"], "peak_from": "compiled"}
    return told | {key: best[key] for key in ("samples_per_second", "peak_bytes")}


def table(rows: Sequence[Row]) -> str:
    cells = [
        (
            *(str(row["slots"]), str(row["batch"])),
            *(common.number(row[key], ".4g") for key in ("seconds", "samples_per_second")),
            "does not fit" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.3f}",
        )
        for row in rows
    ]
    return common.table(("slots", "batch", "s/step", "samples/s", "peak GB"), cells)


if __name__ == "__main__":
    leave(main)
