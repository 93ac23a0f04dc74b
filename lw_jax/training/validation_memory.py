"""Memory of validation at eval.batch beside the training state, by arithmetic; a run halves the batch by itself."""

import dataclasses

from lw_jax.core.types import Tree
from lw_jax.training.memory import bytes_of
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.out_of_memory import halved
from lw_jax.training.recipe import Plannable
from lw_jax.training.step_spec import StepSpec
from sharding import place


@dataclasses.dataclass(frozen=True)
class ValidationMemory:
    """Memory of a forward pass over one batch of held-out examples, the training state resident."""

    batch: int  # examples on all devices: eval.batch, rounded up to the data axis
    peak_bytes: int  # of the fullest device
    fits: bool
    largest: int  # the batch that fits, halved from `batch` as a run does; 0: not even one example per device


def estimate(step_spec: StepSpec, recipe: Plannable, widths: Tree, limit: MemoryLimit) -> ValidationMemory:
    """Returns the memory of validation; `widths` is one example's shapes."""
    data = step_spec.placement.data
    batch = size = place.round_up(step_spec.cfg.eval.batch, data)
    peak = held = evaluation_bytes(step_spec, recipe, widths, batch // data)
    while held > limit.usable and size > data:
        size = halved(size, data)
        held = evaluation_bytes(step_spec, recipe, widths, size // data)
    return ValidationMemory(batch, peak, peak <= limit.usable, size if held <= limit.usable else 0)


def evaluation_bytes(step_spec: StepSpec, recipe: Plannable, widths: Tree, rows: int) -> int:
    """Returns the bytes of the fullest device during a forward pass over so many rows per device."""
    terms, placement = recipe.terms(widths, rows), step_spec.placement
    state, frozen, sizes = place.device_bytes(step_spec.state()), step_spec.frozen(), []
    for mesh in placement.meshes:
        here = [name for name, at in placement.readers.items() if at.mesh == mesh]
        held = sum(place.device_bytes(frozen[name]) for name in here)
        working = [terms[name].forward for name in here]
        if mesh == placement.learner:
            held, working = held + state, [*working, terms[""].forward]
        sizes.append(held + int(max(working)))
    return max(sizes)


def describe(found: ValidationMemory, limit: MemoryLimit) -> str:
    """Returns one line: the memory of validation and, above the limit, the eval.batch that would fit."""
    line = (
        f"validation at eval.batch={found.batch}: {bytes_of(found.peak_bytes)} of {bytes_of(limit.usable)} per device"
    )
    if found.fits:
        return f"{line}, by arithmetic"
    if found.largest:
        return f"{line}, by arithmetic, would not fit; --config.eval.batch={found.largest} would"
    return f"{line}, by arithmetic, would not fit, nor would one example per device"
