"""Where a training step spends its time, by the function that a kernel was traced in.

    python benchmarks/step_profile.py --config configs/embeddings.py --config.optim.kind=adamw    # measured, here
    python benchmarks/step_profile.py --config configs/large.py --config.mesh.placement=single \
        --config.compute.remat=none --config.train.global_batch=32 --target h100x1                # predicted, no card

Measured are XLA's own events of a step on random weights and tokens, as in `run.py bench`: on a CPU kernels run at once
on several cores, so that their seconds may add up to more than the step's. On a GPU each kernel is launched by itself,
not in CUDA graphs, whose kernels have no name of an operation. With --target the step is compiled for absent cards, and
each kernel takes what the planner's roofline says. A kernel that fuses several things counts as its result.
"""

import collections
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core import environment
from lw_jax.core.errors import UserError, leave

REST = "no function of this project"

Row = tuple[str, float, float]  # a function, with "products" where it multiplies matrices; seconds; bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    parser.add_argument("--target", default="", help="cards that are elsewhere, as h100x1")
    args = parser.parse_args(rest)
    values = {"mesh.placement": "single"} | assignments
    if args.target:
        environment.prepare_compiler(everywhere=True)
        print(table(*predict(args.target, args.config, values)))
    else:
        environment.hide_idle_cuda()
        print(table(*measure(args.config, values)))
    return 0


def predict(target: str, config: str, values: dict[str, str]) -> tuple[str, list[Row]]:
    """Returns the planned step of one device of a target and its kernels."""
    from lw_jax.planning import hardware, hlo_counts, placement_search, roofline

    cfg = common.load(config, values)
    found = hardware.find(cfg, target)
    if found.compile is None or found.target is None:
        raise UserError(f"--target {target}: {found.why_not_compiled}")
    best = placement_search.pick(tried := placement_search.choose(cfg, found))
    if best is None or best.needs is None:
        raise UserError(f"--target {target}: {'; '.join(one.obstacle for one in tried)}")
    rows: list[Row] = []
    for compiled, part in best.needs.programs.values():
        for one in hlo_counts.analyse(compiled.as_text()).kernels:
            times = one.executed * part.runs
            rows.append((name_of(one), times * roofline.seconds_of(one, found.target.card), times * one.bytes))
    return f"a step of {best.micro_batch} at once on {target}, predicted", rows


def measure(config: str, values: dict[str, str]) -> tuple[str, list[Row]]:
    """Returns a step on this machine's device and its kernels."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    from lw_jax.benchmarking import timing
    from lw_jax.benchmarking.measurement import Measured
    from lw_jax.planning import hlo_counts, planner
    from lw_jax.training.step_spec import StepSpec

    measured = Measured(*planner.resolve_auto(common.load(config, values)), repeats=1)
    (row,), needs = measured.step(), measured.needs
    assert needs and row.seconds, "the step was measured"
    spec, (compiled, _) = StepSpec(measured.cfg, measured.recipe), needs.programs["step"]
    batch = measured.fill(spec.batch(measured.recipe.batch_widths(), needs.accumulation))
    found, kernels = trace(timing.stepper(spec, compiled, batch)), hlo_counts.kernels_by_name(compiled.as_text())
    rows: list[Row] = []
    for name, (seconds, times) in found.items():
        if one := kernels.get(name):  # loops are none
            rows.append((name_of(one), seconds, times * one.bytes))
    return f"a step of {row.seconds.median:.3f} s", rows


def name_of(kernel: Any) -> str:
    return f"{kernel.source or REST}{', products' if kernel.flops else ''}"


def trace(step: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Returns each operation's seconds in one step, and how often it ran."""
    import jax

    device = "/device:GPU" if jax.default_backend() == "gpu" else "/host:CPU"
    seconds, times = collections.defaultdict[str, float](float), collections.Counter[str]()
    jax.block_until_ready(step())  # warms up
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step())
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines if plane.name.startswith(device) else ():
                for event in line.events:
                    if name := dict(event.stats).get("hlo_op"):
                        seconds[str(name)] += event.duration_ns / 1e9
                        times[str(name)] += 1
    return {name: (taken, times[name]) for name, taken in seconds.items()}


def table(what: str, rows: Sequence[Row]) -> str:
    """Returns the sums of each function, the longest first."""
    seconds, moved = collections.Counter[str](), collections.Counter[str]()
    for name, taken, size in rows:
        seconds[name] += taken  # pyright: ignore[reportArgumentType]  (a counter adds floats as well)
        moved[name] += int(size)
    whole = sum(seconds.values())
    cells = [
        (name, f"{1e3 * taken:.1f}", f"{taken / whole:.1%}", f"{moved[name] / 1e9:.1f}")
        for name, taken in seconds.most_common()
        if taken > whole / 1000
    ]
    return f"{what}; its kernels add up to {whole:.3f} s\n\n{common.table(('function', 'ms', 'share', 'GB'), cells)}"


if __name__ == "__main__":
    leave(main)
