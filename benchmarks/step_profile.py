"""Shares of a training step's time by kind of work, from XLA's own events; on a CPU.

    python benchmarks/step_profile.py --config configs/embeddings.py --config.optim.kind=adamw
    python benchmarks/step_profile.py --config configs/embeddings.py --config.compute.dtype=fp32

Weights and tokens are random, as in `run.py bench`. Kernels run at once on several cores, so that their seconds may add
up to more than the step's. A kernel that fuses several things counts as its largest: a product, else attention, else
the rest by its form.
"""

import collections
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from lw_jax.core import environment
from lw_jax.core.errors import UserError, leave

# Kind of work -> pattern of a kernel's text and place in the program; the first that matches counts.
KINDS = {
    "products of attention": r"\bdot\(.*(bkts|bkst|bkse|BTNH|BNTS|BSNH)",
    "products with matrices": r"\bdot\(",
    "attention, not products": r"(bkts|bkst|BNTS|reduce_max|softmax|jit\(_where\))",
    "activations saved": r"dynamic-update-slice|^broadcast",
    "optimizer": r"jit\(step\)/(add|sub|mul|div|sqrt|integer_pow|pow)\b",
}
REST = "elementwise, norms, copies"
LOOPS = ("while", "call", "conditional")


class Kernel(NamedTuple):
    """One instruction of the compiled step that runs by itself."""

    opcode: str
    text: str  # its own line and that of the computation it calls


def main(argv: Sequence[str] | None = None) -> int:
    parser, assignments, rest = common.parser(__doc__, argv)
    args = parser.parse_args(rest)
    environment.hide_idle_cuda()
    import jax

    from lw_jax.benchmarking.measurement import Measured
    from lw_jax.planning import planner

    if jax.default_backend() != "cpu":
        raise UserError("the events of a GPU have other names; use jax.profiler and XProf there")
    values = {"mesh.placement": "single"} | assignments
    measured = Measured(*planner.resolve_auto(common.load(args.config, values)), repeats=1)
    (row,), needs = measured.step(), measured.needs
    assert needs and row.seconds, "the step was measured"
    kernels = parse(needs.programs["step"][0].as_text())
    print(table(shares(kernels, trace(stepper(measured, needs))), row.seconds.median))
    return 0


def stepper(measured: Any, needs: Any) -> Callable[[], Any]:
    """Returns the measured step on random arrays."""
    import jax

    from lw_jax.benchmarking import timing
    from lw_jax.training.step_spec import StepSpec

    spec, (compiled, _) = StepSpec(measured.cfg, measured.recipe), needs.programs["step"]
    batch = measured.fill(spec.batch(measured.recipe.batch_widths(), needs.accumulation))
    now, frozen = {"state": timing.fill(spec.state)}, timing.fill(spec.frozen)

    def step() -> Any:
        now["state"], values = compiled(now["state"], frozen, batch)
        return jax.block_until_ready((now["state"], values))

    return step


def trace(step: Callable[[], Any]) -> dict[str, float]:
    import jax

    found: dict[str, float] = collections.defaultdict(float)
    step()  # warms up
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    name = dict(event.stats).get("hlo_op")
                    if name:
                        found[str(name)] += event.duration_ns / 1e9
    return found


def parse(text: str) -> dict[str, Kernel]:
    bodies = {name: body for name, body in re.findall(r"\n%?([\w.\-]+) \([^\n]*\{\n(.*?)\n\}", text, re.DOTALL)}
    found = {}
    for name, opcode, rest in re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = \S.*? ([\w\-]+)\((.*)$", text, re.MULTILINE):
        called = re.search(r"calls=%([\w.\-]+)", rest)
        found[name] = Kernel(opcode, f"{opcode}({rest} {bodies.get(called[1], '') if called else ''}")
    return found


def kind_of(name: str, kernel: Kernel) -> str:
    text = f"{name.removeprefix('wrapped_')} {kernel.text}"
    for kind, pattern in KINDS.items():
        parts = re.findall(r"[^\n]*", text) if kind.startswith("products") else [text]
        if any(re.search(pattern, part) for part in parts):
            return kind
    return REST


def shares(kernels: Mapping[str, Kernel], seconds: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """Returns (kind, name, seconds) of each kernel that ran, the longest first; loops hold others and do not count."""
    known = {name: kernels.get(name, Kernel("", "")) for name in seconds}
    rows = [
        (kind_of(name, kernel), name, seconds[name]) for name, kernel in known.items() if kernel.opcode not in LOOPS
    ]
    return sorted(rows, key=lambda row: -row[2])


def table(rows: Sequence[tuple[str, str, float]], seconds: float) -> str:
    sums = collections.Counter[str]()
    for kind, _, taken in rows:
        sums[kind] += taken  # pyright: ignore[reportArgumentType]  (a counter adds floats as well)
    whole = sum(sums.values())
    cells = [(kind, f"{taken:.2f}", f"{taken / whole:.0%}") for kind, taken in sums.most_common()]
    told = f"a step takes {seconds:.2f} s; its kernels add up to {whole:.2f} s"
    return f"{told}\n\n{common.table(('kind', 's', 'share'), cells)}"


if __name__ == "__main__":
    leave(main)
