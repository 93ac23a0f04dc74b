"""What a compiled step needs of each device, by the compiler's own figures."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

from jax.sharding import Mesh

from lw_jax.core.types import Tree
from lw_jax.training import train_step
from lw_jax.training.program import Program
from lw_jax.training.recipe import Branched, Plannable
from sharding import place


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes on the device that needs most, for one micro-batch; `programs` are the compiled parts of the step."""

    micro_batch: int
    accumulation: int
    weights: int  # frozen
    trainable: int  # with the copies that readers apart are given
    optimizer: int
    batch: int
    activations: int  # all else: what the programs hold while they run, gradients and logits included
    logits: int  # of `activations`: one reader's logits [b t v] in fp32
    by_mesh: tuple[int, ...]  # peak of each mesh's devices, the learner's first
    programs: Mapping[str, tuple[Any, train_step.Part]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def peak(self) -> int:
        """Returns the bytes of the fullest device."""
        return max(self.by_mesh)


Compile = Callable[[Any], Any]  # jax.stages.Lowered -> jax.stages.Compiled


def compile_here(lowered: Any) -> Any:
    """Compiles for devices that are present."""
    return lowered.compile()


def measure(program: Program, widths: Tree, accumulation: int, *, compile: Compile = compile_here) -> Needs:
    """Compiles the step for its own devices and returns what it needs."""
    parts = program.lower(widths, accumulation)
    compiled = {name: (compile(part.lowered), part) for name, part in parts.items()}
    state, frozen, batch = program.state(), program.frozen(), program.batch(widths, accumulation)
    resident = {mesh: _Resident() for mesh in program.placement.meshes}
    learner = program.placement.learner
    resident[learner].trainable = place.device_bytes(state["trainable"])
    resident[learner].optimizer = place.device_bytes(state["opt_state"])
    resident[learner].batch = place.device_bytes({key: value for key, value in batch.items() if key != "readers"})
    for name, at in program.placement.readers.items():
        here = resident[at.mesh]
        here.weights += place.device_bytes(frozen[name])
        here.batch += place.device_bytes(batch["readers"][name])
        if program.placement.apart and at.mesh != learner:
            here.trainable += place.device_bytes(cast(Branched, program.recipe).part(name, state["trainable"]))
    moving = place.device_bytes(state)
    peaks = [resident[mesh].total + _working(compiled, mesh, moving) for mesh in program.placement.meshes]
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    worst = resident[program.placement.meshes[fullest]]
    return Needs(
        micro_batch=program.share // accumulation,
        accumulation=accumulation,
        weights=worst.weights,
        trainable=worst.trainable,
        optimizer=worst.optimizer,
        batch=worst.batch,
        activations=peaks[fullest] - worst.total,
        logits=_logits(program, widths, accumulation),
        by_mesh=tuple(peaks),
        programs=compiled,
    )


@dataclasses.dataclass
class _Resident:
    """What stays on a device between programs."""

    weights: int = 0
    trainable: int = 0
    optimizer: int = 0
    batch: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.trainable + self.optimizer + self.batch


def _working(compiled: Mapping[str, tuple[Any, train_step.Part]], mesh: Mesh, state: int) -> int:
    """Returns what the programs of one mesh hold at most beyond what stays there; `state` counts the bytes that move.

    Readers apart: outputs of the shared part (latents and what its backward pass needs) live until that has run, sums
    of gradients until the update. Latents that cross between meshes are too small to be counted.
    """
    here = {name: program for name, (program, part) in compiled.items() if part.mesh == mesh}
    summed = sum(_fresh(program) for name, program in here.items() if name not in ("step", "share", "update"))
    carried = summed if any(part.runs > 1 for _, part in compiled.values()) else 0
    kept = _fresh(here["share"]) if "share" in here else 0

    def held(name: str, program: Any) -> int:
        if name == "update":
            return program.memory_analysis().argument_size_in_bytes - state
        earlier = summed - _fresh(program) if name == "pull" and not carried else carried
        return earlier + (kept if name not in ("step", "share") else 0)

    return max(
        held(name, program) + program.memory_analysis().temp_size_in_bytes + _fresh(program)
        for name, program in here.items()
    )


def _fresh(program: Any) -> int:
    """Returns the bytes of a program's outputs that reuse no donated input."""
    found = program.memory_analysis()
    return found.output_size_in_bytes - found.alias_size_in_bytes


def _logits(program: Program, widths: Tree, accumulation: int) -> int:
    """Returns the fp32 logits that exist at once on one device, by the recipe's own arithmetic."""
    if not isinstance(program.recipe, Plannable):
        return 0
    terms = program.recipe.terms(widths, program.share // accumulation)
    return int(max(one.logits for one in terms.values()))


def bytes_of(size: float) -> str:
    """Returns "31.7 GB" (1e9 bytes), as device data sheets and this project count."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def placed_bytes(program: Program) -> int:
    """Returns the bytes of weights, trainables and moments on the fullest device, without compiling anything."""
    state, frozen = program.state(), program.frozen()
    learner = program.placement.learner
    sizes = dict.fromkeys(program.placement.meshes, 0)
    sizes[learner] += place.device_bytes(state)
    for name, at in program.placement.readers.items():
        sizes[at.mesh] += place.device_bytes(frozen[name])
    return max(sizes.values())
