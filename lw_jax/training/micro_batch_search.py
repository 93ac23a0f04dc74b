"""How much of a batch fits on the devices at hand, found by compiling; and what to do when it did not."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from lw_jax.core import runtime
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import DTYPES, Tree
from lw_jax.training import memory
from lw_jax.training.memory import Needs, bytes_of
from lw_jax.training.program import Program
from sharding import place

_T = TypeVar("_T")
GROWING = 0.7  # share of activations that at least grows with the micro-batch (0.8 and more in docs/planning.md)
LINED = 4  # sizes measured before halving: the ends, the one on the line and its neighbour settle a straight line


class OutOfMemory(RuntimeError):
    """The device could not hold a program or its arrays."""


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes of one device, and the share of them that a plan may use."""

    memory: int
    utilisation: float

    @property
    def limit(self) -> int:
        """Returns the bytes that a plan may use."""
        return int(self.memory * self.utilisation)


def room(cfg: Config) -> Room | None:
    """Returns the room on this machine's devices: as the configuration says, else as the runtime reports, else None."""
    found = room_of(cfg, runtime.device_memory() or 0)
    return found if found.memory else None


def room_of(cfg: Config, memory: int) -> Room:
    """Returns the room on devices of so many bytes, if the configuration says nothing else."""
    return Room(int(cfg.mesh.memory_gb * 1e9) or memory, cfg.mesh.target_utilisation)


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """Turns the runtime's out-of-memory errors, and no other, into `OutOfMemory`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        raise OutOfMemory(" ".join(str(error).split())[:300]) from error


def halved(size: int, multiple: int) -> int:
    """Returns the next smaller batch to try: half of it, rounded up to a multiple of the data axis."""
    return place.round_up(size // 2, multiple)


class Batch:
    """A number of examples that is halved until a computation which changes nothing fits into memory.

    Smaller ones stay: the next computation begins with what fitted. `multiple` divides it: the data axis.
    """

    def __init__(self, size: int, *, multiple: int, tell: Callable[[str], None]):
        self.size, self._multiple, self._tell = size, multiple, tell

    def run(self, compute: Callable[[int], _T]) -> _T:
        """Returns what `compute` makes of the size; begins anew with half of it each time that memory runs out.

        Raises:
          OutOfMemory: the smallest size does not fit.
          UserError: of several processes one ran out of memory, and the others wait for it.
        """
        while True:
            try:
                with out_of_memory():
                    return compute(self.size)
            except OutOfMemory as error:
                if jax.process_count() > 1:
                    rule = "processes cannot agree on another one by now; everything up to here is saved"
                    raise UserError(f"out of memory with eval.batch={self.size}: {rule}; set it to less") from error
                if self.size <= self._multiple:
                    raise OutOfMemory(f"out of memory with one example a device: {error}") from error
                before, self.size = self.size, halved(self.size, self._multiple)
                self._tell(f"out of memory with eval.batch={before}: now {self.size}; the figures stay the same")


def needs_of(
    program: Program, widths: Tree, micro_batch: int, *, compile: memory.Compile = memory.compile_here
) -> Needs:
    """Returns the needs of one micro-batch size."""
    return memory.measure(program, widths, program.accumulation(micro_batch), compile=compile)


def largest_micro_batch(
    program: Program, widths: Tree, room: Room, *, compile: memory.Compile = memory.compile_here, guess: int = 0
) -> Needs:
    """Returns the needs of the largest micro-batch that fits into the room; of one example where none does.

    A step that the compiler itself finds too large counts as not fitting.
    """

    def try_one(micro: int) -> Needs | None:
        try:
            with out_of_memory():
                return memory.measure(program, widths, program.accumulation(micro), compile=compile)
        except OutOfMemory:
            return None

    return search(legal_sizes(program), try_one, room.limit, guess=guess)


def legal_sizes(program: Program) -> list[int]:
    """Returns the micro-batches that divide a device's share, ascending."""
    return [n for n in range(1, program.share + 1) if program.share % n == 0]


def search(legal: list[int], try_one: Callable[[int], Needs | None], limit: int, *, guess: int = 0) -> Needs:
    """Returns the needs of the largest legal size (ascending) whose peak is within the limit, else of the smallest.

    `guess` is where to begin (0: at the largest). Needs grow about linearly with the size, so that a line through two
    measured points names the next one to try, and halving goes on where the line did not end it. A size decides by its
    own measure, unless a smaller one leaves no doubt.
    """
    points: dict[int, Needs | None] = {}

    def fits(index: int) -> bool:
        if _is_clearly_beyond(legal[index], points, limit):
            return False
        found = points[legal[index]] = try_one(legal[index])
        return found is not None and found.peak <= limit

    low, high = -1, len(legal)  # everything up to low fits, nothing from high on does
    aim = float(guess or legal[-1])
    while high - low > 1:
        on_line = max((i for i in range(low + 1, high) if legal[i] <= aim), default=low + 1)
        middle = on_line if len(points) <= LINED else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
        aim = _on_line({size: found for size, found in points.items() if found is not None}, limit)
    found = points[legal[max(low, 0)]]
    if found is None:
        raise OutOfMemory(f"not even a micro-batch of {legal[0]} can be compiled for this device")
    return found


def _is_clearly_beyond(size: int, points: dict[int, Needs | None], limit: int) -> bool:
    """Says whether a measured smaller size leaves no doubt: programs far too large are the slowest to compile."""
    smaller = [(known, found) for known, found in points.items() if found is not None and known < size]
    if not smaller:
        return False
    known, found = max(smaller, key=lambda pair: pair[0])
    return found.peak + GROWING * found.activations * (size / known - 1) > limit


def _on_line(points: dict[int, Needs], limit: int) -> float:
    """Returns the size at which the line through the outermost measured points reaches the limit.

    Of one point, half of its size or twice, towards the limit; of none, the smallest there is.
    """
    if not points:
        return 0.0
    small, large = min(points), max(points)
    if small == large:
        return small * 2 if points[small].peak <= limit else small / 2
    slope = (points[large].peak - points[small].peak) / (large - small)
    return small + (limit - points[small].peak) / slope if slope > 0 else float(large)


def describe(program: Program, needs: Needs, room: Room) -> list[str]:
    """Returns the derived values as lines for people."""
    placement, cfg = program.placement, program.cfg
    device = placement.learner.devices.flat[0]
    used = f"{needs.peak / room.memory:.0%} of {bytes_of(room.memory)}, target {room.utilisation:.0%}"
    rows = {
        "devices": f"{placement.devices} x {device.device_kind}, {bytes_of(room.memory)} each",
        "placement": placement.describe().removeprefix("placement "),
        "micro-batch": f"{needs.micro_batch} a device",
        "accumulation": f"{needs.accumulation}",
        "global batch": f"{cfg.train.global_batch} = {needs.micro_batch} x {placement.data} x {needs.accumulation}",
        "recomputation": cfg.compute.remat,
        "weights": f"{bytes_of(needs.weights)} frozen, {bytes_of(needs.trainable)} trained, "
        f"{bytes_of(needs.optimizer)} optimizer",
        "activations": f"{bytes_of(needs.activations)}, of it {bytes_of(needs.logits)} logits",
        "peak": f"{bytes_of(needs.peak)} a device: {used}",
    }
    line = "=" * 70
    return [
        line,
        "elastic configuration (compiled)",
        line,
        *(f"  {key:<15}{value}" for key, value in rows.items()),
        line,
    ]


def refusal(program: Program, needs: Needs, room: Room) -> str:
    """Returns why nothing fits, and what would."""
    cfg = program.cfg
    advice = []
    if cfg.compute.remat != "full":
        advice.append("--config.compute.remat=full")
    if needs.weights > room.limit / 2:
        advice.append("split the readers (--config.mesh.placement=tensor, fsdp or split over more devices)")
        if any(llm.weights == "fp32" for llm in cfg.llms.values()):
            advice.append("store them as bf16 (--config.llms.NAME.weights=bf16)")
        if any(llm.weights in DTYPES for llm in cfg.llms.values()):
            advice.append("store their matrices in 4 bits (--config.llms.NAME.weights=nf4)")
    advice.append("name fewer or smaller readers")
    return (
        f"one example a device needs {bytes_of(needs.peak)} ({bytes_of(needs.weights)} frozen weights, "
        f"{bytes_of(needs.activations)} activations), the target is {bytes_of(room.limit)} = {room.utilisation:.0%} of "
        f"{bytes_of(room.memory)}; {', or '.join(advice)}"
    )
