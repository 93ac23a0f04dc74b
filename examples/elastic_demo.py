"""Trains the smoke configuration under six placements on 1 to 4 virtual devices and draws their loss curves.

    python examples/elastic_demo.py
    python examples/elastic_demo.py --steps 100 --output curves.png --config.optim.learning_rate=1e-3

Every run is the command `python run.py` in a process of its own that sees as many CPU devices as its placement takes;
the global batch is the same in all. Prints the table, writes the picture, and ends with code 1 where a curve leaves
the others by more than 1e-5 of its value. The tiny readers are made first, once, by fewer steps than the smoke
configuration's: what is compared is one curve with another. Needs matplotlib (requirements-dev.txt); some two minutes
on two cores.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lw_jax.core import config
from lw_jax.core.command_line import take_assignments
from lw_jax.core.errors import UserError, leave
from lw_jax.training import run_folder

ROOT = Path(__file__).resolve().parent.parent
# Beside configs/smoke.py: readers and batches of a size at which starting and compiling take most of the time.
SMALLER = {"selfmade.steps": 90, "selfmade.batch": 32, "data.cards": 512, "train.global_batch": 16}
AT_ONCE = 2  # runs: a process compiles on one core
TOLERANCE = 1e-5  # relative, fp32: the same sums in another order, after some steps of Adam


@dataclasses.dataclass(frozen=True)
class Placed:
    """One placement on so many devices."""

    devices: int
    strategy: str
    model: int = 1
    data: int = -1


PLACEMENTS = {
    "single": Placed(1, "single"),
    "replicate": Placed(2, "replicate"),
    "split": Placed(2, "split"),
    "hybrid3": Placed(3, "hybrid3"),
    "fsdp": Placed(4, "fsdp"),
    "tensor": Placed(4, "tensor", model=2),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of every run (default: 30)")
    parser.add_argument("--output", type=Path, default=Path("elastic_demo.png"), help="the picture")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS), help="default: all")
    overrides, words = take_assignments(argv)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:

        def run(name: str) -> tuple[str, list[float]]:
            placed = PLACEMENTS[name]
            print(f"training: {name} on {placed.devices}", flush=True)
            return train(placed, Path(scratch) / name, args.steps, overrides, cpu_environment(placed.devices))

        first, *others = args.placements  # the first one makes the readers
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = [run(first), *pool.map(run, others)]
        told = {name: where for name, (where, _) in zip(args.placements, found, strict=True)}
        curves = {name: losses for name, (_, losses) in zip(args.placements, found, strict=True)}
    print(table(curves, told))
    draw(curves, args.output)
    spread = largest_difference(curves)
    verdict = "the curves are the same" if spread <= TOLERANCE else "THE CURVES DIFFER"
    print(f"largest relative difference between any two curves: {spread:.1e} (tolerance {TOLERANCE:.0e}): {verdict}")
    print(f"drawn in {args.output}")
    return 0 if spread <= TOLERANCE else 1


def command(placed: Placed, workdir: Path, steps: int, overrides: Mapping[str, object]) -> list[str]:
    """Returns the command of a run; `overrides`: values of its configuration by dotted key."""
    settings = {"mesh.placement": placed.strategy, "mesh.model": placed.model, "mesh.data": placed.data}
    settings |= {"train.steps": steps, "compute.dtype": "fp32"}
    settings |= SMALLER | {"train.log_every": 1, "train.eval_every": 0, "train.alarm_step": 0, "eval.examples": 1}
    words = config.flags({**settings, **overrides})
    return [sys.executable, str(ROOT / "run.py"), "--config", "configs/smoke.py", "--workdir", str(workdir), *words]


def cpu_environment(devices: int) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    flags = f"{environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    # Compiling takes most of the time of runs as small as these, and what XLA optimises is no part of the comparison.
    return environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}


def train(
    placed: Placed, workdir: Path, steps: int, overrides: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[str, list[float]]:
    """Returns what a run of its own process says of its placement, and its losses.

    Raises:
        UserError: the run failed, with the end of what it said.
    """
    words = command(placed, workdir, steps, overrides)
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise UserError(f"training under {placed.strategy} ended with code {done.returncode}: {done.stderr[-2000:]}")
    placed_lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("placement ")]
    where = placed_lines[0] if placed_lines else "the only device"  # of which a run says nothing
    rows = run_folder.read_metrics(workdir / "metrics.jsonl")
    return where, [row["train/loss"] for row in rows if "train/loss" in row]


def differences(curve: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns a curve's relative difference from another at every step."""
    return [(ours - theirs) / abs(theirs) for ours, theirs in zip(curve, reference, strict=True)]


def largest_difference(curves: Mapping[str, Sequence[float]]) -> float:
    """Returns the largest relative difference between any two curves at one step."""
    steps = zip(*curves.values(), strict=True)
    return max((max(values) - min(values)) / min(map(abs, values)) for values in steps)


def table(curves: Mapping[str, Sequence[float]], told: Mapping[str, str]) -> str:
    """Returns each placement's first and last loss and how far it went from the first placement's curve."""
    reference = next(iter(curves))
    lines = [f"{'placement':<11}{'devices':<9}{'first loss':<12}{'last loss':<12}{'from ' + reference:<13}where"]
    for name, curve in curves.items():
        far = max(map(abs, differences(curve, curves[reference])))
        lines.append(
            f"{name:<11}{PLACEMENTS[name].devices:<9}{curve[0]:<12.7f}{curve[-1]:<12.7f}{far:<13.1e}{told[name]}"
        )
    return "\n".join(lines)


def draw(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Writes the picture: the curves over each other, and below what is left when the first is taken away."""
    reference = next(iter(curves))
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    colors = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000")  # Okabe and Ito: told apart by everyone
    markers = ("o", "s", "^", "D", "x")
    steps = range(1, len(curves[reference]) + 1)
    above.plot(steps, curves[reference], color="#c8c8c8", linewidth=7, label=_label(reference))
    below.axhline(0, color="#c8c8c8", linewidth=4)
    others = [name for name in curves if name != reference]
    for i, name in enumerate(others):
        style = {"color": colors[i], "marker": markers[i], "markersize": 5, "linewidth": 1, "fillstyle": "none"}
        every = (i, len(others))  # markers take turns, or the last would hide the others
        above.plot(steps, curves[name], label=_label(name), markevery=every, **style)
        parts = [1e6 * value for value in differences(curves[name], curves[reference])]
        below.plot(steps, parts, markevery=every, **style)
    above.set_ylabel("training loss, nats a token")
    above.set_title("The same training run under every placement", loc="left")
    above.legend(frameon=False)
    below.set_ylabel(f"relative difference from\n{reference}, millionths")
    spread = 1e6 * largest_difference(curves)
    told = f"Largest difference between any two: {spread:.2g} millionths, tolerance {TOLERANCE * 1e6:.0f}"
    below.set_title(told, loc="left", fontsize="medium")
    below.set_xlabel("optimizer step")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _label(name: str) -> str:
    placed = PLACEMENTS[name]
    return f"{name} on {placed.devices} device{'s' if placed.devices > 1 else ''}"


if __name__ == "__main__":
    leave(main)
