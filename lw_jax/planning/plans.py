"""Plans as data: what `plan --json` prints, the cache keeps and a job is made from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lw_jax.core import config
from lw_jax.core.config_sections import HYBRIDS, MODEL_AXIS, OWN_DATA
from lw_jax.planning.roofline import Times
from lw_jax.training.evaluation_memory import EvaluationMemory
from lw_jax.training.memory import bytes_of
from sharding.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One placement, and whether the run fits."""

    strategy: str
    mesh: str  # axis sizes, data x model
    data: int = -1  # -1: the strategy finds the axis itself
    model: int = 1
    devices_used: int = 0
    peak_bytes: int = 0  # of the fullest device
    fits: bool = True
    obstacle: str = ""  # why it does not

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.mesh}"

    def describe(self) -> str:
        return self.name

    def overrides(self) -> dict[str, str | int]:
        """Returns, by path, the configuration values that make a run of it."""
        data = -1 if self.strategy in OWN_DATA else self.data
        return {"mesh.placement": self.strategy, "mesh.data": data, "mesh.model": self.model}


@dataclasses.dataclass(frozen=True)
class Guess:
    """Arithmetic beside a compiled candidate, at its micro-batch."""

    peak_bytes: int
    flops: float
    collective_bytes: float
    step_seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCandidate(Candidate):
    """One placement of the training step with one recomputation; bytes are those of the fullest device."""

    remat: str  # "-" where no program was described
    micro_batch: int = 0
    accumulation: int = 0
    rows: int = 0  # of a step, padding included
    filling: str = ""  # which of them are padding
    weights_bytes: int = 0
    trainable_bytes: int = 0
    optimizer_bytes: int = 0
    batch_bytes: int = 0
    activation_bytes: int = 0
    flops: float = 0.0  # matrix products of one step on the busiest device
    collective_bytes: float = 0.0  # that one device sends in a step
    moved_bytes: float = 0.0  # that all kernels of one device read and write in a step; 0: nothing was compiled
    seconds: Times | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    hours: float | None = None  # of the run's steps
    estimate: Guess | None = None

    def describe(self) -> str:
        return f"{self.name}, micro-batch {self.micro_batch} x {self.accumulation} accumulated, remat {self.remat}"

    def overrides(self) -> dict[str, str | int]:
        return super().overrides() | {"train.micro_batch": self.micro_batch, "compute.remat": self.remat}


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Readers' weights in fewer bits, and the placements that then fit or nearly do, by arithmetic."""

    weights: str
    bits: str
    assignments: dict[str, str]
    fits: tuple[StepCandidate, ...]
    close: tuple[StepCandidate, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run takes of given devices."""

    target: str
    devices: int
    hosts: int = 1
    per_host: int
    compiled: bool
    why_not_compiled: str = ""
    cached: bool = False
    memory_bytes: int = 0
    limit_bytes: int = 0  # of the memory, that a run may use
    host_memory_bytes: int = 0  # of one process
    plan_seconds: float = 0.0
    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None
    why: str = ""  # it was chosen, or nothing was
    hours: float | None = None
    untimed: str = ""  # why the hours are not known, where the card's peak rates are
    validation_hours: float | None = None
    start_hours: float | None = None  # of a cache wire's start, before the steps
    caching_key: str = ""  # key of what a frozen model computes before the first step, which is in no hours
    remedies: tuple[Remedy, ...] = ()

    def describe_remedies(self) -> list[str]:
        """Returns a line for each packing under which something fits, else one that says that nothing does."""
        lines = []
        for remedy in self.remedies:
            flags = " ".join(config.flags(remedy.assignments))
            close = f"; close to it: {_peaks(remedy.close)}" if remedy.close else ""
            if remedy.fits:
                lines.append(f"weights in {remedy.bits} fit, by arithmetic: {flags}: {_peaks(remedy.fits)}{close}")
            elif close:
                lines.append(f"weights in {remedy.bits} may fit, by arithmetic: {flags}{close}")
        if self.remedies and not lines:
            bits = " or ".join(remedy.bits for remedy in self.remedies)
            lines.append(f"weights in {bits} would not fit either, by arithmetic")
        return lines


def layout(placed: Placement) -> dict[str, Any]:
    return {
        "mesh": mesh_of(placed),
        "data": -1 if placed.strategy in HYBRIDS else placed.data,
        "model": placed.learner.shape["model"] if placed.strategy in MODEL_AXIS else 1,
        "devices_used": placed.devices,
    }


def mesh_of(placed: Placement) -> str:
    if not placed.on_several_meshes:
        return axes(placed.data, placed.learner.shape["model"])
    return ", ".join(f"{name} {axes(*component.mesh.devices.shape)}" for name, component in placed.readers.items())


def axes(data: int, model: int) -> str:
    return f"{'?' if data == -1 else data}x{model}"


def obstacles(candidates: Sequence[Candidate]) -> str:
    return "; ".join(f"{candidate.name}: {candidate.obstacle}" for candidate in candidates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan(Plan):
    """Plan of a run of training steps."""

    candidates: tuple[StepCandidate, ...] = ()
    chosen: StepCandidate | None
    precision: str = ""
    global_batch: int = 0
    unit: tuple[str, int] = ("samples", 1)  # of an example, and its number
    steps: int = 0
    forward_share: float = 1.0  # time of a held-out example over that of a training one
    start_peak_bytes: int = 0  # of a cache wire's start
    validation: EvaluationMemory | None = None
    generation: EvaluationMemory | None = None


def _peaks(candidates: tuple[StepCandidate, ...]) -> str:
    return ", ".join(f"{candidate.name} {bytes_of(candidate.peak_bytes)}" for candidate in candidates)
