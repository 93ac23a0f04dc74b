"""Device memory of a compiled train step, from the compiler's own memory analysis."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from lw_jax.core.types import Tree
from lw_jax.training import train_step
from lw_jax.training.step_spec import StepSpec
from sharding import place

Programs = Mapping[str, tuple[Any, train_step.Part]]  # each compiled


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on the fullest device for one micro-batch; `programs` are the compiled parts of the step."""

    micro_batch: int
    accumulation: int
    weights: int  # frozen
    trainable: int  # with the copies on the meshes of separate readers
    optimizer: int
    batch: int
    activations: int  # the rest: temporaries of the programs, gradients and logits included
    by_mesh: tuple[int, ...]  # peak of each mesh's devices, the trainable mesh first
    programs: Programs = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def peak(self) -> int:
        return max(self.by_mesh)

    def figures(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "programs"}


Compile = Callable[[Any], Any]  # jax.stages.Lowered -> jax.stages.Compiled


def compile_here(lowered: Any) -> Any:
    return lowered.compile()


def measure(step_spec: StepSpec, widths: Tree, accumulation: int, *, compile: Compile = compile_here) -> StepMemory:
    parts = step_spec.lower(widths, accumulation)
    compiled = {name: (compile(part.lowered), part) for name, part in parts.items()}
    state, batch = step_spec.state, step_spec.batch(widths, accumulation)
    learner, stays = step_spec.placement.learner, resident(step_spec)
    stays[learner]["batch"] += place.device_bytes({key: value for key, value in batch.items() if key != "readers"})
    for name, component in step_spec.placement.readers.items():
        here = stays[component.mesh]
        here["batch"] += place.device_bytes(batch["readers"][name])
        if component.mesh != learner:
            here["trainable"] += place.device_bytes(step_spec.recipe.part(name, state["trainable"]))
    working = {mesh: _working(compiled, mesh, place.device_bytes(state)) for mesh in stays}
    return of_step(step_spec.cut(accumulation), stays, working, compiled)


def resident(step_spec: StepSpec) -> dict[Mesh, dict[str, int]]:
    """Returns the bytes that stay on a device of each mesh between programs, by field of `StepMemory`; no batch."""
    nothing = dict.fromkeys(("trainable", "optimizer", "batch"), 0)
    sizes = {mesh: {"weights": size, **nothing} for mesh, size in step_spec.frozen_bytes().items()}
    state, learner = step_spec.state, sizes[step_spec.placement.learner]
    learner["trainable"] = place.device_bytes(state["trainable"])
    learner["optimizer"] = place.device_bytes(state["opt_state"])
    return sizes


def of_step(
    cut: place.Cut, stays: Mapping[Mesh, dict[str, int]], working: Mapping[Mesh, int], programs: Programs
) -> StepMemory:
    """Returns the memory of a step by what stays on each mesh's devices and what is at work there beside it."""
    peaks = {mesh: sum(parts.values()) + working[mesh] for mesh, parts in stays.items()}
    fullest = max(peaks, key=lambda mesh: peaks[mesh])
    return StepMemory(
        micro_batch=cut.micro_batch,
        accumulation=cut.accumulation,
        **stays[fullest],
        activations=working[fullest],
        by_mesh=tuple(peaks.values()),
        programs=programs,
    )


def _working(compiled: Programs, mesh: Mesh, state: int) -> int:
    """Returns the peak of one mesh's programs beyond its resident bytes; `state` is the size of the donated state.

    With separate readers the outputs of the shared part (latents and residuals) live until its backward pass, gradient
    sums until the update. Latents that cross between meshes are too small to count.
    """
    here = {name: program for name, (program, part) in compiled.items() if part.mesh == mesh}
    summed = sum(fresh_bytes(program) for name, program in here.items() if name not in ("step", "share", "update"))
    carried = summed if any(part.runs > 1 for _, part in compiled.values()) else 0
    residuals = fresh_bytes(here["share"]) if "share" in here else 0

    def alive(name: str, program: Any) -> int:
        if name == "update":
            return program.memory_analysis().argument_size_in_bytes - state
        earlier = summed - fresh_bytes(program) if name == "pull" and not carried else carried
        return earlier + (residuals if name not in ("step", "share") else 0)

    return max(
        alive(name, program) + program.memory_analysis().temp_size_in_bytes + fresh_bytes(program)
        for name, program in here.items()
    )


def fresh_bytes(program: Any) -> int:
    """Returns the bytes of a program's outputs that reuse no donated input."""
    analysis = program.memory_analysis()
    return analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def bytes_of(size: float) -> str:
    """Returns "31.7 GB" (1e9 bytes), as device data sheets and this project count."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def placed_bytes(step_spec: StepSpec) -> int:
    """Returns the bytes of weights, trainable parameters and moments on the fullest device, without compiling."""
    sizes = step_spec.frozen_bytes()
    sizes[step_spec.placement.learner] += place.device_bytes(step_spec.state)
    return max(sizes.values())
