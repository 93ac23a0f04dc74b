"""Search over placement, recomputation and micro-batch: candidates are compiled, the fastest that fits is taken."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lw_jax import recipes
from lw_jax.core import config, processes
from lw_jax.core.config import REMATS, Config
from lw_jax.core.progress import phase
from lw_jax.core.types import Tree
from lw_jax.planning import estimate as estimates
from lw_jax.planning import hlo_counts, plans, roofline
from lw_jax.planning.estimate import Estimate
from lw_jax.planning.hardware import Hardware
from lw_jax.planning.plans import Guess, StepCandidate
from lw_jax.planning.roofline import Times
from lw_jax.training import micro_batch_search, out_of_memory
from lw_jax.training.memory import StepMemory, bytes_of, placed_bytes
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.recipe import Recipe
from lw_jax.training.step_spec import StepSpec
from sharding import place
from sharding import placement as placements
from sharding.errors import PlacementError
from sharding.placement import Placement

# A micro-batch of this size saturates a GPU's matmuls (their rows are examples x positions): where the card's speed is
# not known, recomputation only pays below it.
ENOUGH = 16


@dataclasses.dataclass(frozen=True)
class Trial:
    """One placement of the train step with one recomputation.

    Attributes:
        strategy: name of the sharding table, e.g. "fsdp".
        mesh: axis sizes as text, data x model.
        remat: recomputation, or "-" where no program was described.
        placement: the meshes; None where the devices do not form them.
        needs: memory and micro-batch, compiled or by arithmetic.
        times: roofline seconds of a step; None where they are not known.
        untimed: reason why they are not known, where the card's peak rates are.
        obstacle: reason why the step cannot run; empty where it can.
        flops: matrix products of one step on the busiest device.
        collective_bytes: bytes that one device sends in a step.
        moved_bytes: bytes that all kernels of one device read and write in a step; 0 where nothing was compiled.
        estimate: arithmetic of the same micro-batch.
        program: the step and its arrays as shapes.
    """

    strategy: str
    mesh: str
    remat: str
    placement: Placement | None = None
    needs: StepMemory | None = None
    times: Times | None = None
    untimed: str = ""
    obstacle: str = ""
    flops: float = 0.0
    collective_bytes: float = 0.0
    moved_bytes: float = 0.0
    estimate: Estimate | None = None
    program: StepSpec | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def fits(self) -> bool:
        return self.needs is not None and not self.obstacle

    def candidate(self) -> StepCandidate:
        """Returns what a plan says of it."""
        needs, guess, placed, found = self.needs, self.estimate, self.placement, {}
        if placed:
            found |= plans.layout(placed)
        if needs and self.program:
            cut = self.program.cut(needs.accumulation)
            found |= {"micro_batch": needs.micro_batch, "accumulation": needs.accumulation}
            found |= {"rows": cut.rows, "filling": cut.describe(), "peak_bytes": needs.peak}
            found |= {"weights_bytes": needs.weights, "trainable_bytes": needs.trainable}
            found |= {"optimizer_bytes": needs.optimizer, "batch_bytes": needs.batch}
            found |= {"activation_bytes": needs.activations}
        if self.times and self.program:
            seconds, batch = self.times.total, self.program.cfg.train.global_batch
            found |= {"seconds": self.times, "step_seconds": seconds, "samples_per_second": batch / seconds}
        if guess:
            seconds = guess.times.total if guess.times else None
            found["estimate"] = Guess(guess.needs.peak, guess.flops, guess.collective_bytes, seconds)
        for name in ("strategy", "mesh", "remat", "fits", "obstacle", "flops", "collective_bytes", "moved_bytes"):
            found[name] = getattr(self, name)
        return StepCandidate(**found)


def choose(cfg: Config, hardware: Hardware) -> list[Trial]:
    """Returns what was tried; those whose weights fit are compiled (or estimated), for the longest examples."""
    readers, count = recipes.reader_bytes(cfg), len(hardware.devices)
    found, tried = [], list(strategies(cfg, readers, count, hardware.hosts))
    what = "compiling the training step for" if hardware.compile else "estimating"
    with phase(
        f"planning: {what} each placement of {count} device{'s' * (count > 1)}", len(tried), "placements"
    ) as done:
        for strategy, data, model in done.track(tried):
            if strategy == "fsdp" and any(one.strategy == "fsdp" and one.placement for one in found):
                continue  # on more devices
            try:
                placements.check_processes(strategy, data, model, devices=count, processes=hardware.hosts)
                placed = placements.place(strategy, readers, data=data, model=model, devices=hardware.devices)
                placed = dataclasses.replace(placed, stands_for="gpu" if hardware.target else "")
                found += list(_measure(cfg, placed, hardware))
            except PlacementError as error:
                found.append(Trial(strategy, plans.axes(data, model), "-", obstacle=str(error)))
    return found


def data_axis(cfg: Config, count: int, processes: int) -> int:
    """Returns the devices that data parallelism takes: all that make a device's share of the batch smaller.

    Of several processes each must own a part of the mesh, so there all devices.
    """
    return count if processes > 1 else place.spread(cfg.train.global_batch, count)


def strategies(
    cfg: Config, readers: Mapping[str, int], count: int, processes: int = 1
) -> Iterator[tuple[str, int, int]]:
    """Yields (strategy, data, model) to try on so many devices; a configured placement is the only one.

    Of several "fsdp" a later one is for widths that the earlier one's data axis does not divide.
    """
    if cfg.mesh.placement != "auto":
        yield cfg.mesh.placement, cfg.mesh.data, cfg.mesh.model
        return
    yield "single", -1, 1
    if count == 1:
        return
    rows = data_axis(cfg, count, processes)
    if rows > 1:
        yield "replicate", rows, 1
        yield "fsdp", rows, 1
        even = 1 << rows.bit_length() - 1  # the largest power of two: widths have many factors of two
        if 1 < even < rows and processes == 1:
            yield "fsdp", even, 1
    if any(readers.values()):  # tensor splits what is frozen
        yield from (("tensor", count // model, model) for model in range(2, count + 1) if count % model == 0)
    if len(readers) > 1:
        yield "split", -1, 1
    if len(readers) == 2:
        yield ("hybrid3" if count == 3 else "hybrid4"), -1, 1


def pick(found: Sequence[Trial]) -> Trial | None:
    """Returns the fastest candidate that fits; of equally fast ones that with the fewest devices, then the least full.

    Times are predictions: a gain of less than 2 % does not pay for more devices. Where one of them is not known, the
    arithmetic of one device stands for time, and of equals the one that sends least is taken.
    """
    fitting = [candidate for candidate in found if candidate.fits]
    times = [candidate.times for candidate in fitting if candidate.times]
    timed = len(times) == len(fitting)

    def cost(one: Trial) -> float:
        return one.times.total if timed and one.times else one.flops

    near = 1.02 * min(map(cost, fitting), default=0.0)

    def order(candidate: Trial) -> tuple[bool, float, int, int]:
        assert candidate.placement is not None and candidate.needs is not None, "it fits"
        sent = 0.0 if timed else candidate.collective_bytes
        return cost(candidate) > near, sent, candidate.placement.devices, candidate.needs.peak

    return min(fitting, key=order, default=None)


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A candidate before compilation, with the estimate of its largest micro-batch that fits."""

    candidate: Trial
    program: StepSpec
    widths: Tree
    estimate: Estimate


def _measure(cfg: Config, placed: Placement, hardware: Hardware) -> Iterator[Trial]:
    """Yields the candidates of one placement that were compiled, the best one last.

    Recomputations are tried in the order of their estimates. As a rule one is compiled; a second one where a smaller
    micro-batch of the first fits than estimated, which may make it slower.
    """
    room, drafts = hardware.limit, []
    for remat in REMATS[cfg.recipe] if cfg.compute.remat == "auto" else (cfg.compute.remat,):
        own = config.with_remat(cfg, remat)
        recipe = recipes.make(own, placed, outline=True)
        program = StepSpec(own, recipe)
        program.accumulation(cfg.train.micro_batch)  # or PlacementError: the batch does not go with the devices
        candidate = Trial(placed.strategy, plans.mesh_of(placed), remat, placed, program=program)
        if (whole := placed_bytes(program)) > room.usable:
            why = f"weights and optimizer alone take {bytes_of(whole)} of {bytes_of(room.usable)}"
            yield dataclasses.replace(candidate, remat="-", obstacle=why)
            return
        drafts.append(_draft(candidate, program, recipe, hardware))
    fitting: Trial | None = None
    for draft in sorted(drafts, key=lambda draft: _rank(draft, room)):
        if fitting and not _is_slower(fitting.estimate, draft.estimate):
            return
        try:
            needs = _needs(draft, hardware)
        except out_of_memory.OutOfMemory as error:
            yield dataclasses.replace(draft.candidate, obstacle=f"too large for the compiler: {error}")
            continue
        guess = estimates.estimate(draft.program, draft.widths, needs.micro_batch, hardware.target)
        found = dataclasses.replace(draft.candidate, needs=needs, estimate=guess)
        if needs.peak <= room.usable:
            fitting = _time(found, hardware)
            yield fitting
            continue
        why = f"a micro-batch of {needs.micro_batch} needs {bytes_of(needs.peak)} of {bytes_of(room.usable)}"
        yield dataclasses.replace(found, obstacle=why)


def _is_slower(one: Estimate | None, other: Estimate) -> bool:
    return bool(one and one.times and other.times and one.times.total > other.times.total)


def _draft(candidate: Trial, program: StepSpec, recipe: Recipe, hardware: Hardware) -> _Draft:
    shapes, room = recipe.batch_widths(), hardware.limit
    micro = program.cfg.train.micro_batch
    if not micro:

        def estimate(micro: int) -> StepMemory:
            return estimates.estimate(program, shapes, micro, None).needs

        micro = micro_batch_search.search(micro_batch_search.legal_sizes(program), estimate, room.usable).micro_batch
    found = estimates.estimate(program, shapes, micro, hardware.target)
    return _Draft(candidate, program, shapes, found)


def _rank(draft: _Draft, room: MemoryLimit) -> tuple[bool, bool, float]:
    """Sort key: candidates that fit first, then by time; where the card's speed is not known, by micro-batch."""
    needs, times = draft.estimate.needs, draft.estimate.times
    small = needs.accumulation > 1 and needs.micro_batch < ENOUGH
    return needs.peak > room.usable, times is None and small, times.total if times else 0.0


def _needs(draft: _Draft, hardware: Hardware) -> StepMemory:
    """Returns the needs of the configured micro-batch, else of the largest that fits; raises OutOfMemory."""
    program, compile = draft.program, hardware.compile
    if compile is None:
        return draft.estimate.needs
    if program.cfg.train.micro_batch:
        return micro_batch_search.measure(program, draft.widths, program.cfg.train.micro_batch, compile=compile)
    guess = draft.estimate.needs.micro_batch
    return micro_batch_search.largest_micro_batch(program, draft.widths, hardware.limit, compile=compile, guess=guess)


def _time(candidate: Trial, hardware: Hardware) -> Trial:
    """Returns the candidate with its predicted step time, which all processes take from the first one."""
    found = processes.from_first(lambda: _figures(candidate, hardware))
    return dataclasses.replace(candidate, **found | {"times": found["times"] and Times(**found["times"])})


def _figures(candidate: Trial, hardware: Hardware) -> dict[str, Any]:
    """Returns the figures of a step by field of `Trial`: by arithmetic where its programs cannot be read.

    Readers on separate meshes run concurrently, so the slowest counts; all other programs run one after the other.
    """
    needs, guess, placement = candidate.needs, candidate.estimate, candidate.placement
    assert needs is not None and placement is not None and guess is not None
    arithmetic = {"flops": guess.flops, "collective_bytes": guess.collective_bytes}
    if not needs.programs:
        return arithmetic | {"times": guess.times and dataclasses.asdict(guess.times)}
    times: dict[str, Times] = {}
    flops: dict[Any, float] = {}
    wire: dict[Any, float] = {}
    moved: dict[Any, float] = {}
    for name, (compiled, part) in needs.programs.items():
        try:
            analysed = hlo_counts.analyse(compiled.as_text())
        except hlo_counts.Unreadable as error:
            return arithmetic | {"times": None, "untimed": str(error)}
        flops[part.mesh] = flops.get(part.mesh, 0.0) + part.runs * analysed.flops
        sent = sum(each.wire_bytes for each in analysed.collectives)
        wire[part.mesh] = wire.get(part.mesh, 0.0) + part.runs * sent
        moved[part.mesh] = moved.get(part.mesh, 0.0) + part.runs * (analysed.matmul_bytes + analysed.traffic_bytes)
        if hardware.target:
            one = roofline.predict(analysed, hardware.target)
            times[name] = Times(part.runs * one.gemm, part.runs * one.memory, part.runs * one.collective)
    concurrent = [times.pop(name) for name in placement.readers if name in times]
    sequential = [*times.values(), *sorted(concurrent, key=lambda one: one.total)[-1:]]
    total = {part: sum(getattr(one, part) for one in sequential) for part in ("gemm", "memory", "collective")}
    return {
        "times": total if hardware.target else None,
        "flops": max(flops.values()),
        "collective_bytes": max(wire.values()),
        "moved_bytes": max(moved.values()),
    }
