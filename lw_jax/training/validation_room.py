"""Whether validation fits beside the training state at eval.batch, by arithmetic; a run halves its batch by itself."""

import dataclasses

from lw_jax.core.types import Tree
from lw_jax.training.memory import bytes_of
from lw_jax.training.micro_batch_search import Room, halved
from lw_jax.training.program import Program
from lw_jax.training.recipe import Plannable
from sharding import place


@dataclasses.dataclass(frozen=True)
class Validation:
    """The forward pass over one batch of held-out examples, the training state resident."""

    batch: int  # examples on all devices: eval.batch, rounded up to the data axis
    peak_bytes: int  # of the fullest device
    fits: bool
    largest: int  # the batch that fits, halved from `batch` as a run does; 0: not even one example a device


def validation(program: Program, recipe: Plannable, widths: Tree, room: Room) -> Validation:
    """Returns what validation takes; `widths` is one example's shapes."""
    data = program.placement.data
    asked = size = place.round_up(program.cfg.eval.batch, data)
    peak = held = evaluation_bytes(program, recipe, widths, asked // data)
    while held > room.limit and size > data:
        size = halved(size, data)
        held = evaluation_bytes(program, recipe, widths, size // data)
    return Validation(asked, peak, peak <= room.limit, size if held <= room.limit else 0)


def evaluation_bytes(program: Program, recipe: Plannable, widths: Tree, rows: int) -> int:
    """Returns the bytes of the fullest device while so many rows a device are evaluated: nothing is kept backward."""
    terms, placement = recipe.terms(widths, rows), program.placement
    state, frozen, sizes = place.device_bytes(program.state()), program.frozen(), []
    for mesh in placement.meshes:
        here = [name for name, at in placement.readers.items() if at.mesh == mesh]
        held = sum(place.device_bytes(frozen[name]) for name in here)
        working = [terms[name].forward for name in here]
        if mesh == placement.learner:
            held, working = held + state, [*working, terms[""].forward]
        sizes.append(held + int(max(working)))
    return max(sizes)


def describe(found: Validation, room: Room) -> str:
    """Returns one line: what validation takes and, where that is too much, which eval.batch would fit."""
    told = f"validation at eval.batch={found.batch}: {bytes_of(found.peak_bytes)} of {bytes_of(room.limit)} a device"
    if found.fits:
        return f"{told}, by arithmetic"
    if found.largest:
        return f"{told}, by arithmetic, would not fit; --config.eval.batch={found.largest} would"
    return f"{told}, by arithmetic, would not fit, nor would one example a device"
