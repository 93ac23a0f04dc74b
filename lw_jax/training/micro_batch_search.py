"""Search for the largest micro-batch that fits into device memory, by compiling the step."""

from collections.abc import Callable

from lw_jax.core import processes
from lw_jax.core.precision import DTYPES
from lw_jax.core.types import Tree
from lw_jax.training import memory, out_of_memory
from lw_jax.training.memory import StepMemory, bytes_of
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.out_of_memory import OutOfMemory
from lw_jax.training.step_spec import StepSpec
from sharding import place

ACTIVATION_GROWTH = 0.7  # least share of activations that grows with the batch (measured: 0.8 and more)
LINE_TRIALS = 4  # sizes measured before bisection: the ends, the interpolated size and its neighbour settle a line


def measure(
    step_spec: StepSpec, widths: Tree, micro_batch: int, *, compile: memory.Compile = memory.compile_here
) -> StepMemory:
    """Returns the memory of a step with this micro-batch; all processes compile it, and the first one's figures hold.

    Others would lead to other choices: a program that waits without end for the others'.

    Raises:
      OutOfMemory: the compiler refuses the step for its size.
    """
    needs, error = None, ""
    try:
        with out_of_memory.detect():
            needs = memory.measure(step_spec, widths, step_spec.accumulation(micro_batch), compile=compile)
    except OutOfMemory as refused:
        error = str(refused)
    figures = processes.from_first(lambda: needs.figures() if needs else error)
    if isinstance(figures, str):
        raise OutOfMemory(figures)
    return StepMemory(**figures | {"by_mesh": tuple(figures["by_mesh"])}, programs=needs.programs if needs else {})


def largest_micro_batch(
    step_spec: StepSpec,
    widths: Tree,
    limit: MemoryLimit,
    *,
    compile: memory.Compile = memory.compile_here,
    guess: int = 0,
) -> StepMemory:
    """Returns the memory of the largest micro-batch within the limit; of one example where none is.

    A step that the compiler refuses for its size does not fit.
    """

    def try_one(micro: int) -> StepMemory | None:
        try:
            return measure(step_spec, widths, micro, compile=compile)
        except OutOfMemory:
            return None

    return search(legal_sizes(step_spec), try_one, limit.usable, guess=guess)


def legal_sizes(step_spec: StepSpec) -> list[int]:
    """Returns the micro-batches of which the largest that fits is the best, ascending."""
    return place.micro_batches(global_batch=step_spec.cfg.train.global_batch, data_axis=step_spec.placement.data)


def search(legal: list[int], try_one: Callable[[int], StepMemory | None], limit: int, *, guess: int = 0) -> StepMemory:
    """Returns the memory of the largest legal size (ascending) whose peak is within the limit, else of the smallest.

    `guess` is the first size to try (0: the largest). Memory grows about linearly with the size: the next size is the
    one where a line through two measured points reaches the limit, then bisection. Each size is decided by its own
    measurement, unless a smaller one is clear enough.
    """
    points: dict[int, StepMemory | None] = {}

    def fits(index: int) -> bool:
        if _is_clearly_beyond(legal[index], points, limit):
            return False
        needs = points[legal[index]] = try_one(legal[index])
        return needs is not None and needs.peak <= limit

    low, high = -1, len(legal)  # low fits, high does not
    aim = float(guess or legal[-1])
    while high - low > 1:
        interpolated = max((i for i in range(low + 1, high) if legal[i] <= aim), default=low + 1)
        middle = interpolated if len(points) <= LINE_TRIALS else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
        aim = _interpolate({size: needs for size, needs in points.items() if needs is not None}, limit)
    chosen = points[legal[max(low, 0)]]
    if chosen is None:
        raise OutOfMemory(f"not even a micro-batch of {legal[0]} can be compiled for this device")
    return chosen


def _is_clearly_beyond(size: int, points: dict[int, StepMemory | None], limit: int) -> bool:
    """Says whether a smaller measured size rules this one out: the largest programs are the slowest to compile."""
    smaller = [(known, needs) for known, needs in points.items() if needs is not None and known < size]
    if not smaller:
        return False
    known, needs = max(smaller, key=lambda pair: pair[0])
    return needs.peak + ACTIVATION_GROWTH * needs.activations * (size / known - 1) > limit


def _interpolate(points: dict[int, StepMemory], limit: int) -> float:
    """Returns the size at which the line through the outermost measured points reaches the limit.

    With one point: half or twice its size, towards the limit. With none: the smallest size.
    """
    if not points:
        return 0.0
    small, large = min(points), max(points)
    if small == large:
        return small * 2 if points[small].peak <= limit else small / 2
    slope = (points[large].peak - points[small].peak) / (large - small)
    return small + (limit - points[small].peak) / slope if slope > 0 else float(large)


def describe(needs: StepMemory, limit: MemoryLimit) -> str:
    parts = {"frozen": needs.weights, "trained": needs.trainable, "optimizer": needs.optimizer}
    sizes = ", ".join(f"{bytes_of(size)} {name}" for name, size in parts.items())
    return (
        f"micro-batch: {needs.micro_batch} per device is the largest that fits: {bytes_of(needs.peak)} at the peak, "
        f"{needs.peak / limit.memory:.0%} of {bytes_of(limit.memory)} (target {limit.utilisation:.0%}); of it {sizes}, "
        f"{bytes_of(needs.activations)} activations"
    )


def refusal(step_spec: StepSpec, needs: StepMemory, limit: MemoryLimit) -> str:
    cfg = step_spec.cfg
    advice = []
    if cfg.compute.remat != "full":
        advice.append("--config.compute.remat=full")
    if needs.weights > limit.usable / 2:
        advice.append("split the readers (--config.mesh.placement=tensor, fsdp or split over more devices)")
        if any(llm.weights == "fp32" for llm in cfg.llms.values()):
            advice.append("store them as bf16 (--config.llms.NAME.weights=bf16)")
        if any(llm.weights in DTYPES for llm in cfg.llms.values()):
            advice.append("store their matrices in 4 bits (--config.llms.NAME.weights=nf4)")
    advice.append("name fewer or smaller readers")
    return (
        f"one example per device needs {bytes_of(needs.peak)} ({bytes_of(needs.weights)} frozen weights, "
        f"{bytes_of(needs.activations)} activations), the target is {bytes_of(limit.usable)} = "
        f"{limit.utilisation:.0%} of {bytes_of(limit.memory)}; {', or '.join(advice)}"
    )
