"""Memory of validation at eval.batch beside the training state, compiled or by arithmetic; a run takes what fits."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core import processes
from lw_jax.core.types import Tree
from lw_jax.training import out_of_memory
from lw_jax.training.memory import Compile, bytes_of
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.out_of_memory import OutOfMemory, halved
from lw_jax.training.recipe import Recipe
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.train_step import Part
from sharding import place

GROWTH = 0.7  # least share of the working memory that grows with the batch, as `micro_batch_search.ACTIVATION_GROWTH`


@dataclasses.dataclass(frozen=True)
class ValidationMemory:
    """Memory of one batch of held-out examples, in validation or in generation."""

    batch: int  # examples on all devices: eval.batch, rounded up to the data axis
    peak_bytes: int  # of the fullest device
    fits: bool
    largest: int  # the batch that fits, halved from `batch` as a run does; 0: not even one example per device
    compiled: bool = False  # from the compiler's memory analysis; else by arithmetic
    smallest_bytes: int = 0  # where not even one example per device fits: its peak
    resident_bytes: int = 0  # of `peak_bytes`: weights and state

    def fits_doubled(self, limit: MemoryLimit) -> bool:
        """Says whether twice the memory beside weights and state would fit: then it need not be compiled."""
        return 2 * self.peak_bytes - self.resident_bytes <= limit.usable


def estimate(step_spec: StepSpec, recipe: Recipe, widths: Tree, limit: MemoryLimit) -> ValidationMemory:
    """Returns the memory of validation by arithmetic; `widths` is one example's shapes."""

    def held(rows: int) -> int:
        return evaluation_bytes(step_spec, recipe, widths, rows)

    return search(step_spec, limit, held, resident=resident_by_mesh(step_spec), compiled=False)


def measure(step_spec: StepSpec, widths: Tree, limit: MemoryLimit, *, compile: Compile) -> ValidationMemory:
    """Returns the memory of validation, compiled for the step's own devices."""
    state, frozen, data = step_spec.state(), step_spec.frozen(), step_spec.placement.data
    key = jax.eval_shape(lambda: jax.random.key(0))
    resident = resident_by_mesh(step_spec)

    def lower(rows: int) -> list[tuple[Part, int]]:
        batch = _batch(step_spec, widths, rows * data)
        parts = step_spec.step.lower_evaluation(state["trainable"], frozen, batch, key)
        size = place.device_bytes(batch)
        return [(part, size) for part in parts.values()]

    return search(step_spec, limit, Compiled(resident, lower, compile, limit), resident=resident, compiled=True)


def search(
    step_spec: StepSpec, limit: MemoryLimit, held: Callable[[int], int], *, resident: Mapping[Mesh, int], compiled: bool
) -> ValidationMemory:
    """Returns the memory at eval.batch and the batch that fits.

    Args:
        step_spec: the step beside which it is taken.
        limit: of a device.
        held: rows per device -> peak of the fullest device.
        resident: bytes of weights and state on each mesh.
        compiled: `held` is the compiler's.
    """
    data = step_spec.placement.data
    batch = size = place.round_up(step_spec.cfg.eval.batch, data)
    peak = last = held(batch // data)
    while last > limit.usable and size > data:
        size = halved(size, data)
        last = held(size // data)
    fits = last <= limit.usable
    largest, smallest = (size, 0) if fits else (0, last)
    return ValidationMemory(batch, peak, peak <= limit.usable, largest, compiled, smallest, min(resident.values()))


class Compiled:
    """Peak bytes of the fullest device for so many rows on each: what is resident, and the most of its programs."""

    def __init__(
        self,
        resident: Mapping[Mesh, int],
        lower: Callable[[int], list[tuple[Part, int]]],
        compile: Compile,
        limit: MemoryLimit,
    ):
        """Takes `lower`: rows per device -> programs, each with the bytes of its inputs beside the weights."""
        self._resident, self._lower, self._compile, self._limit = resident, lower, compile, limit
        self._first: tuple[int, int] | None = None  # rows and peak of the first compilation

    def __call__(self, rows: int) -> int:
        """Returns the peak; a size that an earlier one rules out is not compiled."""
        if self._first is not None:
            larger, peak = self._first
            held = min(self._resident.values())
            least = int(held + GROWTH * (peak - held) * rows / larger)
            if rows > 1 and least > self._limit.usable:
                return least
        refused = peak = max(self._resident.values()) + self._limit.memory
        with contextlib.suppress(OutOfMemory), out_of_memory.detect():  # the compiler refuses it for its size
            peak = self._measure(rows)
        peak = processes.from_first(lambda: peak)  # as `micro_batch_search.measure`
        if peak != refused:
            self._first = self._first or (rows, peak)
        return peak

    def _measure(self, rows: int) -> int:
        peaks = dict(self._resident)
        for part, inputs in self._lower(rows):
            found: Any = self._compile(part.lowered).memory_analysis()
            fresh = found.output_size_in_bytes - found.alias_size_in_bytes
            peaks[part.mesh] = max(
                peaks[part.mesh], self._resident[part.mesh] + inputs + found.temp_size_in_bytes + fresh
            )
        return max(peaks.values())


def resident_by_mesh(step_spec: StepSpec) -> dict[Mesh, int]:
    """Returns the bytes of weights and training state on one device of each mesh."""
    sizes = step_spec.frozen_bytes()
    sizes[step_spec.placement.learner] += place.device_bytes(step_spec.state())
    return sizes


def evaluation_bytes(step_spec: StepSpec, recipe: Recipe, widths: Tree, rows: int) -> int:
    """Returns the bytes of the fullest device during a forward pass over so many rows per device."""
    terms, placement = recipe.terms(widths, rows), step_spec.placement
    sizes = []
    for mesh, held in resident_by_mesh(step_spec).items():
        working = [terms[name].forward for name, at in placement.readers.items() if at.mesh == mesh]
        if mesh == placement.learner:
            working.append(terms[""].forward)
        sizes.append(held + int(max(working)))
    return max(sizes)


def _batch(step_spec: StepSpec, widths: Tree, size: int) -> Tree:
    """Returns a batch of held-out examples [b ...] as shapes where they are read."""

    def put(tree: Tree, mesh: Mesh) -> Tree:
        at = NamedSharding(mesh, P("data"))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype, sharding=at), tree)

    return place.put_parts(widths, step_spec.placement, put)


def describe(found: ValidationMemory, limit: MemoryLimit, *, part: str = "validation") -> str:
    """Returns one line: the memory at eval.batch and, above the limit, the eval.batch that would fit."""
    how = "compiled" if found.compiled else "by arithmetic"
    used = f"{bytes_of(found.peak_bytes)} of {bytes_of(limit.usable)}"
    line = f"{part} at eval.batch={found.batch}: {used} per device, {how}"
    if found.fits:
        return line
    if found.largest:
        return f"{line}, would not fit; --config.eval.batch={found.largest} would"
    return f"{line}, would not fit, nor would one example per device ({bytes_of(found.smallest_bytes)})"
