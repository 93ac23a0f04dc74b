"""Search over placement, recomputation and micro-batch: candidates are compiled, the fastest that fits is taken."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from lw_jax import recipes
from lw_jax.core import config, processes
from lw_jax.core.config import REMATS, Config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import DTYPES
from lw_jax.core.progress import phase
from lw_jax.planning import estimate as estimates
from lw_jax.planning import hlo_counts, plans, roofline
from lw_jax.planning.estimate import Estimate
from lw_jax.planning.hardware import Hardware
from lw_jax.planning.plans import Guess, Remedy, StepCandidate
from lw_jax.planning.roofline import NO_TIME, Times
from lw_jax.training import micro_batch_search, out_of_memory
from lw_jax.training.memory import StepMemory, bytes_of, placed_bytes
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from sharding import place
from sharding import placement as placements
from sharding.errors import PlacementError
from sharding.placement import Placement

# A micro-batch of this size saturates a GPU's matmuls (their rows are examples x positions): where the card's speed is
# not known, recomputation only pays below it.
ENOUGH = 16

CLOSE = 1.1  # of the limit; arithmetic is up to 12 % above what is compiled (two RTX 4090, nf4: 21.0 for 19.3 GB)
# Packing -> its name in messages, and the storage types that take more bits.
PACKINGS = {"int8": ("8 bits", (*DTYPES,)), "nf4": ("4 bits", (*DTYPES, "int8", "w8a8", "fp8"))}

_C = TypeVar("_C", bound=StepCandidate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(StepCandidate):
    """A candidate with what its figures come from."""

    fits: bool = False
    # None where the devices do not form the meshes
    program: StepSpec | None = dataclasses.field(default=None, compare=False, repr=False)
    needs: StepMemory | None = None  # compiled or by arithmetic
    untimed: str = ""  # why its seconds are not known, where the card's peak rates are

    def candidate(self) -> StepCandidate:
        return StepCandidate(**{field.name: getattr(self, field.name) for field in dataclasses.fields(StepCandidate)})


def choose(cfg: Config, hardware: Hardware) -> list[Trial]:
    """Returns what was tried; those whose weights fit are compiled (or estimated), for the longest examples."""
    readers, count = recipes.reader_bytes(cfg), len(hardware.devices)
    trials, layouts = [], list(strategies(cfg, readers, count, hardware.hosts))
    what = "compiling the training step for" if hardware.compile else "estimating"
    with phase(
        f"planning: {what} each placement of {count} device{'s' * (count > 1)}", len(layouts), "placements"
    ) as done:
        for strategy, data, model in done.track(layouts):
            if strategy == "fsdp" and any(trial.strategy == "fsdp" and trial.program for trial in trials):
                continue  # on more devices
            try:
                placements.check_processes(strategy, data, model, devices=count, processes=hardware.hosts)
                placed = placements.place(strategy, readers, data=data, model=model, devices=hardware.devices)
                placed = dataclasses.replace(placed, stands_for="gpu" if hardware.target else "")
                trials += list(_measure(cfg, placed, hardware))
            except PlacementError as error:
                mesh = plans.axes(data, model)
                trials.append(Trial(strategy=strategy, mesh=mesh, remat="-", obstacle=str(error)))
    return trials


def fewer_bits(cfg: Config, hardware: Hardware) -> tuple[Remedy, ...]:
    """Returns, for each packing of the readers' weights, every placement that then fits or nearly does.

    By arithmetic, whatever the hardware's compiler: a plan of the packed configuration is the proof. Nothing for a
    recipe without frozen readers, or for readers that are packed as tightly already.
    """
    remedies, uncompiled = [], dataclasses.replace(hardware, compile=None)
    for packing, (words, larger) in PACKINGS.items():
        names = [name for name, llm in cfg.llms.items() if llm.weights in larger]
        packed = {name: dataclasses.replace(cfg.llms[name], weights=packing) for name in names}
        if not packed:
            continue
        try:
            tried = choose(dataclasses.replace(cfg, llms={**cfg.llms, **packed}), uncompiled)
        except UserError:  # its rows are no whole blocks: this model cannot be packed so
            continue
        options = sorted((trial.candidate() for trial in tried if trial.needs), key=lambda option: option.peak_bytes)
        fits = tuple(option for option in options if option.fits)
        placed = {option.name for option in fits}
        close = {
            option.name: option  # the least full of each
            for option in options[::-1]
            if option.name not in placed and option.peak_bytes <= CLOSE * hardware.limit.usable
        }
        assignments = {f"llms.{name}.weights": packing for name in names}
        remedies.append(Remedy(packing, words, assignments, fits, tuple(close.values())))
    return tuple(remedies)


def data_axis(cfg: Config, count: int, processes: int) -> int:
    """Returns the devices that data parallelism takes: all that make a device's share of the batch smaller.

    Of several processes each must own a part of the mesh, so there all devices.
    """
    return count if processes > 1 else place.spread(cfg.train.global_batch, count)


def splits(count: int, local: int) -> Iterator[tuple[str, int, int]]:
    """Yields (strategy, data, model) that put ever less of each reader on one of so many devices.

    A model axis stays inside the `local` devices of a process.
    """
    for model in (n for n in range(1, local + 1) if local % n == 0):
        yield "tensor" if model > 1 else "replicate", count // model, model


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


def without_compiling(cfg: Config, hardware: Hardware) -> tuple[Config, Placement] | None:
    """Returns what is certain for one device by arithmetic alone; None where candidates are to be compiled.

    There is one placement. A recomputation that is configured is taken where the step fits, none of it where the whole
    batch fits at once: nothing is faster. What truly fits the run finds out when it compiles its step for its data.
    """
    if len(hardware.devices) > 1:
        return None
    readers, auto = recipes.reader_bytes(cfg), cfg.compute.remat == "auto"
    ((strategy, data, model),) = strategies(cfg, readers, 1)
    placed = placements.place(strategy, readers, data=data, model=model)
    cfg = config.with_remat(cfg, "none") if auto else cfg
    program = StepSpec(cfg, recipes.make(cfg, placed, outline=True))
    micro = cfg.train.micro_batch or micro_batch_search.legal_sizes(program)[-1 if auto else 0]
    needs = estimates.estimate(program, program.recipe.batch_widths(), micro, None).needs
    return (cfg, placed) if needs.peak <= hardware.limit.usable else None


def pick(candidates: Sequence[_C]) -> _C | None:
    """Returns the fastest candidate that fits; of equally fast ones that with the fewest devices, then the least full.

    Times are predictions: a gain of less than 2 % does not pay for more devices. Where one of them is not known, the
    arithmetic of one device stands for time, and of equals the one that sends least is taken.
    """
    fitting = [option for option in candidates if option.fits]
    timed = all(option.step_seconds for option in fitting)

    def cost(option: _C) -> float:
        return option.step_seconds if timed and option.step_seconds else option.flops

    near = 1.02 * min(map(cost, fitting), default=0.0)

    def order(option: _C) -> tuple[bool, float, int, int]:
        return cost(option) > near, 0.0 if timed else option.collective_bytes, option.devices_used, option.peak_bytes

    return min(fitting, key=order, default=None)


def _measure(cfg: Config, placed: Placement, hardware: Hardware) -> Iterator[Trial]:
    """Yields the candidates of one placement that were compiled, the best one last.

    Recomputations are tried in the order of their estimates. As a rule one is compiled; a second one where a smaller
    micro-batch of the first fits than estimated, which may make it slower.
    """
    room, drafts = hardware.limit, []
    for remat in REMATS[cfg.recipe] if cfg.compute.remat == "auto" else (cfg.compute.remat,):
        resolved = config.with_remat(cfg, remat)
        program = StepSpec(resolved, recipes.make(resolved, placed, outline=True))
        program.accumulation(cfg.train.micro_batch)  # or PlacementError: the batch does not go with the devices
        candidate = Trial(**plans.layout(placed), strategy=placed.strategy, remat=remat, program=program)
        if (whole := placed_bytes(program)) > room.usable:
            why = f"weights and optimizer alone take {bytes_of(whole)} of {bytes_of(room.usable)}"
            yield dataclasses.replace(candidate, remat="-", obstacle=why)
            return
        drafts.append((candidate, program, _guess(program, hardware)))
    fitting: Trial | None = None
    for candidate, program, first in sorted(drafts, key=lambda draft: _rank(draft[2], room)):
        best = fitting and fitting.estimate and fitting.estimate.step_seconds
        if fitting and not (best and first.times and best > first.times.total):
            return
        try:
            needs = _needs(program, first, hardware)
        except out_of_memory.OutOfMemory as error:
            yield dataclasses.replace(candidate, obstacle=f"too large for the compiler: {error}")
            continue
        guess = estimates.estimate(program, program.recipe.batch_widths(), needs.micro_batch, hardware.target)
        measured = dataclasses.replace(candidate, needs=needs, **_sizes(program, needs, guess))
        if needs.peak <= room.usable:
            fitting = _time(measured, program, needs, guess, hardware)
            yield fitting
            continue
        why = f"a micro-batch of {needs.micro_batch} needs {bytes_of(needs.peak)} of {bytes_of(room.usable)}"
        yield dataclasses.replace(measured, obstacle=why)


def _guess(program: StepSpec, hardware: Hardware) -> Estimate:
    widths, micro = program.recipe.batch_widths(), program.cfg.train.micro_batch
    if not micro:

        def estimate(micro: int) -> StepMemory:
            return estimates.estimate(program, widths, micro, None).needs

        legal = micro_batch_search.legal_sizes(program)
        micro = micro_batch_search.search(legal, estimate, hardware.limit.usable).micro_batch
    return estimates.estimate(program, widths, micro, hardware.target)


def _rank(guess: Estimate, room: MemoryLimit) -> tuple[bool, bool, float]:
    """Sort key: candidates that fit first, then by time; where the card's speed is not known, by micro-batch."""
    needs, times = guess.needs, guess.times
    small = needs.accumulation > 1 and needs.micro_batch < ENOUGH
    return needs.peak > room.usable, times is None and small, times.total if times else 0.0


def _needs(program: StepSpec, guess: Estimate, hardware: Hardware) -> StepMemory:
    widths, micro, compile = program.recipe.batch_widths(), program.cfg.train.micro_batch, hardware.compile
    if compile is None:
        return guess.needs
    if micro:
        return micro_batch_search.measure(program, widths, micro, compile=compile)
    return micro_batch_search.largest_micro_batch(
        program, widths, hardware.limit, compile=compile, guess=guess.needs.micro_batch
    )


def _sizes(program: StepSpec, needs: StepMemory, guess: Estimate) -> dict[str, Any]:
    cut, seconds = program.cut(needs.accumulation), guess.times.total if guess.times else None
    return {
        "micro_batch": needs.micro_batch,
        "accumulation": needs.accumulation,
        "rows": cut.rows,
        "filling": cut.describe(),
        "peak_bytes": needs.peak,
        "weights_bytes": needs.weights,
        "trainable_bytes": needs.trainable,
        "optimizer_bytes": needs.optimizer,
        "batch_bytes": needs.batch,
        "activation_bytes": needs.activations,
        "estimate": Guess(guess.needs.peak, guess.flops, guess.collective_bytes, seconds),
    }


def _time(candidate: Trial, program: StepSpec, needs: StepMemory, guess: Estimate, hardware: Hardware) -> Trial:
    figures = dict(processes.from_first(lambda: _figures(program, needs, guess, hardware)))
    if figures["seconds"]:
        times, batch = Times(**figures["seconds"]), program.cfg.train.global_batch
        figures |= {"seconds": times, "step_seconds": times.total, "samples_per_second": batch / times.total}
    return dataclasses.replace(candidate, fits=True, **figures)


def _figures(program: StepSpec, needs: StepMemory, guess: Estimate, hardware: Hardware) -> dict[str, Any]:
    """Returns the figures of a step by field of `Trial`: by arithmetic where its programs cannot be read.

    Readers on separate meshes run concurrently, so the slowest counts; all other programs run one after the other.
    """
    arithmetic = {"flops": guess.flops, "collective_bytes": guess.collective_bytes}
    if not needs.programs:
        return arithmetic | {"seconds": guess.times and dataclasses.asdict(guess.times)}
    times: dict[str, Times] = {}
    flops, sent, moved = (collections.defaultdict[Any, float](float) for _ in range(3))  # by mesh
    for name, (compiled, part) in needs.programs.items():
        try:
            analysed = hlo_counts.analyse(compiled.as_text())
        except hlo_counts.Unreadable as error:
            return arithmetic | {"seconds": None, "untimed": str(error)}
        flops[part.mesh] += part.runs * analysed.flops
        sent[part.mesh] += part.runs * analysed.wire_bytes
        moved[part.mesh] += part.runs * analysed.moved_bytes
        if hardware.target:
            times[name] = roofline.predict(analysed, hardware.target) * part.runs
    concurrent = [times.pop(name) for name in program.placement.readers if name in times]
    sequential = [*times.values(), *sorted(concurrent, key=lambda reader: reader.total)[-1:]]
    return {
        "seconds": dataclasses.asdict(sum(sequential, NO_TIME)) if hardware.target else None,
        "flops": max(flops.values()),
        "collective_bytes": max(sent.values()),
        "moved_bytes": max(moved.values()),
    }
