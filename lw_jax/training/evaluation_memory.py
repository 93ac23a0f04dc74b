"""Memory of validation or of generation at eval.batch, traced or compiled; a run takes what fits."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from lw_jax.core import processes, rng
from lw_jax.training import out_of_memory, step_costs
from lw_jax.training.memory import Compile, bytes_of, fresh_bytes
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.micro_batch_search import ACTIVATION_GROWTH
from lw_jax.training.out_of_memory import OutOfMemory, halved
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.train_step import Part
from sharding import place


@dataclasses.dataclass(frozen=True)
class EvaluationMemory:
    """Memory of one batch of held-out examples, in validation or in generation."""

    batch: int  # examples on all devices: eval.batch, rounded up to the data axis
    peak_bytes: int  # of the fullest device
    fits: bool
    largest: int  # the batch that fits, halved from `batch` as a run does; 0: not even one example per device
    compiled: bool = False  # from the compiler's memory analysis; else by arithmetic
    smallest_bytes: int = 0  # where not even one example per device fits: its peak
    resident_bytes: int = 0  # of `peak_bytes`: weights and state
    description: str = ""  # one line: the memory at eval.batch and, above the limit, the eval.batch that would fit


@dataclasses.dataclass(frozen=True)
class Pass:
    """What runs on so many rows of a device."""

    name: str  # "validation" or "generation"
    step_spec: StepSpec
    resident: Mapping[Mesh, int]  # bytes of weights and state on one device of each mesh
    trace: Callable[[int], Mapping[Mesh, int]]  # rows -> bytes at work on each mesh
    lower: Callable[[int], list[tuple[Part, int]]]  # rows -> programs, each with its inputs' bytes, without `resident`


def of(evaluated: Pass, limit: MemoryLimit, *, compile: Compile | None = None) -> EvaluationMemory:
    """Returns the memory of a pass; compiled unless twice what its trace says would fit: that takes half a minute."""
    estimate = _search(evaluated, limit, lambda rows: _peak(evaluated, evaluated.trace(rows)), compiled=False)
    if compile is None or 2 * estimate.peak_bytes - estimate.resident_bytes <= limit.usable:
        return estimate
    return _search(evaluated, limit, _Compiled(evaluated, compile, limit), compiled=True)


def validation(step_spec: StepSpec) -> Pass:
    widths, placement = step_spec.recipe.validation_widths(), step_spec.placement
    state, frozen, data = step_spec.state, step_spec.frozen, placement.data
    resident = step_spec.frozen_bytes()
    resident[placement.learner] += place.device_bytes(state)

    def trace(rows: int) -> dict[Mesh, int]:
        costs = step_costs.of(step_spec, widths, rows, backward=False)
        working = dict.fromkeys(placement.meshes, 0)
        for name, mesh in [("", placement.learner), *((name, at.mesh) for name, at in placement.readers.items())]:
            working[mesh] = max(working[mesh], costs[name].peak)
        return working

    def lower(rows: int) -> list[tuple[Part, int]]:
        batch = step_spec.examples(widths, rows * data)
        parts = step_spec.step.lower_evaluation(state["trainable"], frozen, batch, rng.abstract())
        size = place.device_bytes(batch)
        return [(part, size) for part in parts.values()]

    return Pass("validation", step_spec, resident, trace, lower)


def _search(pass_: Pass, limit: MemoryLimit, peak_of: Callable[[int], int], *, compiled: bool) -> EvaluationMemory:
    """Returns the memory at eval.batch and the batch that fits; `peak_of` so many rows per device."""
    data = pass_.step_spec.placement.data
    batch = size = place.round_up(pass_.step_spec.cfg.eval.batch, data)
    peak = last = peak_of(batch // data)
    while last > limit.usable and size > data:
        size = halved(size, data)
        last = peak_of(size // data)
    largest, smallest = (size, 0) if last <= limit.usable else (0, last)
    line = f"{pass_.name} at eval.batch={batch}: {bytes_of(peak)} of {bytes_of(limit.usable)} per device, "
    line += "compiled" if compiled else "by arithmetic"
    if not largest:
        line += f", would not fit, nor would one example per device ({bytes_of(smallest)})"
    elif peak > limit.usable:
        line += f", would not fit; --config.eval.batch={largest} would"
    resident, fits = min(pass_.resident.values()), peak <= limit.usable
    return EvaluationMemory(batch, peak, fits, largest, compiled, smallest, resident, line)


def _peak(pass_: Pass, working: Mapping[Mesh, int]) -> int:
    return max(resident + working[mesh] for mesh, resident in pass_.resident.items())


class _Compiled:
    """Peak bytes of the fullest device for so many rows on each: what is resident, and the most of its programs."""

    def __init__(self, pass_: Pass, compile: Compile, limit: MemoryLimit):
        self._pass, self._compile, self._limit = pass_, compile, limit
        self._first: tuple[int, int] | None = None  # rows and peak of the first compilation

    def __call__(self, rows: int) -> int:
        """Returns the peak; a size that an earlier one rules out is not compiled."""
        resident = self._pass.resident.values()
        if self._first is not None:
            larger, peak = self._first
            least = int(min(resident) + ACTIVATION_GROWTH * (peak - min(resident)) * rows / larger)
            if rows > 1 and least > self._limit.usable:
                return least
        refused = peak = max(resident) + self._limit.memory
        with contextlib.suppress(OutOfMemory), out_of_memory.detect():  # the compiler refuses it for its size
            peak = self._measure(rows)
        peak = processes.from_first(lambda: peak)  # as `micro_batch_search.measure`
        if peak != refused:
            self._first = self._first or (rows, peak)
        return peak

    def _measure(self, rows: int) -> int:
        working = dict.fromkeys(self._pass.resident, 0)
        for part, inputs in self._pass.lower(rows):
            program = self._compile(part.lowered)
            used = program.memory_analysis().temp_size_in_bytes + fresh_bytes(program)
            working[part.mesh] = max(working[part.mesh], inputs + used)
        return _peak(self._pass, working)
