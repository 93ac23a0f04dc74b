"""Plans: the placement, recomputation and micro-batch with which a configuration runs on given devices."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from lw_jax import recipes
from lw_jax.core import config, processes, tree, validation
from lw_jax.core import precision as precision_of
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import DTYPES
from lw_jax.core.progress import phase
from lw_jax.planning import estimate as estimates
from lw_jax.planning import (
    generation_memory,
    gpus,
    hardware,
    host_memory,
    placement_search,
    plan_cache,
    plans,
    start_plan,
    workload,
)
from lw_jax.planning.hardware import HERE, HOST_BYTES, Hardware
from lw_jax.planning.placement_search import Trial
from lw_jax.planning.plans import Plan, StepCandidate, StepPlan
from lw_jax.planning.roofline import Speed
from lw_jax.planning.start_plan import StartPlan
from lw_jax.training import evaluation_memory as evaluation_memories
from lw_jax.training import memory, memory_limit, preflight, run_folder
from lw_jax.training.evaluation_memory import EvaluationMemory
from lw_jax.training.memory import bytes_of
from lw_jax.training.step_spec import StepSpec
from sharding import placement as placements
from sharding.errors import PlacementError
from sharding.placement import Placement

SIZES = {"single": 1, "dual": 2, "quad": 4}  # words for a number of cards on one node


def inspect(cfg: Config) -> list[preflight.Finding]:
    recipe = recipes.outline(config.with_remat(cfg, "none")) if cfg.train.steps else None
    with phase("checking the configuration, and rows of data that are here"):
        return preflight.inspect(cfg, recipe)


def resolve_target(word: str, *, config: str) -> str:
    """Returns the target to plan for: `word`, or for single, dual and quad that many of the configuration's card."""
    if word and word not in SIZES:
        return word
    stem = Path(config.partition(":")[0]).stem
    card = re.fullmatch(r"(?:\d+x)?([a-z]\w*?)x\d+", stem)
    if card is None:
        flag = f"--target {word}" if word else "--target is missing and"
        raise UserError(f"{flag}: configs/{stem}.py names no card; write card and number, as --target h100x4.")
    return f"{card[1]}x{SIZES[word]}" if word else stem


def plan_run(cfg: Config, target: str = "", *, estimate: bool = False) -> Plan:
    if cfg.train.steps:
        return make(cfg, target, estimate=estimate)
    return start_plan.of_target(cfg, target, estimate=estimate)


def make(cfg: Config, target: str = "", *, estimate: bool = False) -> StepPlan:
    """Returns the plan of a target ("h100x4"), or of this machine's devices; compiled plans are cached on disk.

    Raises:
        UserError: the target is not known, or an estimate needs more virtual CPU devices than there are.
        PlacementError: the configured placement does not go with the target's nodes.
    """
    if target and estimate:
        return _timed(_plan(cfg, hardware.find(cfg, target, estimate=True)), cfg)
    file = plan_cache.path(cfg, gpus.parse(target).name if target else HERE)
    cached = plan_cache.read(file)
    # Several processes compile all or none, as XLA shares the work of autotuning among them; the first one's holds.
    if not target and not all(processes.gather(cached is not None)):
        cached = None
    plan = cached or _plan(cfg, hardware.find(cfg, target))
    if not target:
        plan = plan_cache.decode(processes.from_first(lambda: dataclasses.asdict(plan)))
    if not cached and not plan.why_not_compiled:  # the compiler may be installed by the next call
        plan_cache.write(file, plan)
    return _timed(plan, cfg)


def precision(cfg: Config, on: Hardware | None = None) -> str:
    """Returns the precision in which this machine's card, or the target's, runs the configured dtypes."""
    on = on or hardware.here(cfg)
    card = on.target.card if on.target else on.devices[0]
    if getattr(card, "platform", "gpu") == "cpu":
        factors = [workload.arithmetic(cfg, "cpu"), precision_of.of(cfg.compute.dtype, "cpu").factors]
        return precision_of.describe_cpu(factors)
    dtype = precision_of.resolve(cfg.compute.dtype, "gpu")
    dtypes = {dtype, *(llm.weights for llm in cfg.llms.values() if llm.weights in DTYPES)}
    return gpus.describe_precision(sorted(dtypes), getattr(card, "capability", getattr(card, "compute_capability", "")))


def resolve_auto(cfg: Config, *, reading: bool = False) -> tuple[Config, Placement]:
    """Returns the configuration with every "auto" resolved, and the placement on this machine's devices.

    All processes call it, and find the same: the first one decides, under the smallest memory limit of all.
    `reading` resolves for evaluation, which has no gradients and no fixed batch.

    Raises:
        UserError: the processes' processors would take different dtypes.
        sharding.errors.PlacementError: nothing fits, or the configured placement does not go with the devices.
    """
    dtypes = processes.gather(precision_of.resolve(cfg.compute.dtype, jax.devices()[0].platform))
    if len(set(dtypes)) > 1:
        rule = f"the processors of the {len(dtypes)} processes take {', '.join(dtypes)}; set fp32 or bf16"
        raise UserError(f"compute.dtype={cfg.compute.dtype!r}: {rule}")
    cfg = memory_limit.agree(cfg)
    here = hardware.here(cfg)
    cfg, placed = _resolve_placement(config.with_remat(cfg, "none") if reading else cfg, here, reading=reading)
    host_memory.check(recipes.reader_bytes(cfg), placed)
    return generation_memory.resolve_layers(cfg, placed, here.room), placed


def _resolve_placement(cfg: Config, here: Hardware, *, reading: bool) -> tuple[Config, Placement]:
    readers, mesh = recipes.reader_bytes(cfg), cfg.mesh
    if mesh.placement != "auto" and cfg.compute.remat != "auto":
        return cfg, _place_configured(cfg, readers)
    if reading or here.room is None:
        remat = "none" if cfg.compute.remat == "auto" else cfg.compute.remat
        return config.with_remat(cfg, remat), _place_uncompiled(cfg, readers, here, reading=reading)
    if certain := placement_search.without_compiling(cfg, here):
        return certain
    plan = make(cfg)
    best = plan.chosen
    if best is None:
        refusal = (
            f"no placement on {plan.devices} devices with {bytes_of(plan.limit_bytes)} each holds this configuration: "
            f"{plans.obstacles(plan.candidates)}. Use more or larger devices, smaller readers, or a higher "
            "mesh.target_utilisation"
        )
        raise PlacementError("; ".join([refusal, *plan.describe_remedies()]))
    return config.with_remat(cfg, best.remat), placements.place(
        best.strategy, readers, data=best.data, model=best.model
    )


def _place_configured(cfg: Config, readers: Mapping[str, int]) -> Placement:
    """Returns the configured placement; where there are too few devices the error lists the alternatives."""
    mesh, count = cfg.mesh, jax.device_count()
    try:
        return placements.place(mesh.placement, readers, data=mesh.data, model=mesh.model)
    except PlacementError as error:
        strategy = {"hybrid3": 3, "hybrid4": 4, "split": len(readers)}.get(mesh.placement, 1)
        wanted = max(max(mesh.data, 1) * mesh.model, strategy)
        if wanted <= count:
            raise
        flags = "--config.mesh.placement=auto --config.mesh.data=-1 --config.mesh.model=1 --config.train.micro_batch=0"
        raise PlacementError(
            f"{error}. This machine has {count} {jax.devices()[0].device_kind}. Whether it fits elsewhere: python "
            f"run.py plan --config FILE --target h100x{wanted}; on whatever cards there are: --config "
            f"configs/large.py, or {flags}; on virtual devices of a CPU: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        ) from error


def _place_uncompiled(cfg: Config, readers: Mapping[str, int], here: Hardware, *, reading: bool) -> Placement:
    """Returns the configured placement, data parallel, or for evaluation the smallest model axis that fits."""
    mesh, count = cfg.mesh, len(here.devices)
    if mesh.placement != "auto":
        return _place_configured(cfg, readers)
    if not reading:
        rows = placement_search.data_axis(cfg, count, jax.process_count())
        return placements.place("replicate", readers, data=rows)
    local = count // jax.process_count()
    for strategy, data, model in placement_search.splits(count, local):
        placed = placements.place(strategy, readers, data=data, model=model)
        if here.room is None:
            return placed
        resident = host_memory.held(readers, placed) // local  # what a run without steps computes is small beside it
        if cfg.train.steps:
            resident = memory.placed_bytes(StepSpec(cfg, recipes.make(cfg, placed, outline=True)))
        if resident <= here.room.usable:
            return placed
    most = "all of them" if local == count else f"the {local} of each process"
    raise PlacementError(
        f"the readers do not fit on {count} devices of {bytes_of(here.limit.memory)}, split over {most}; use more "
        "devices, or raise mesh.target_utilisation"
    )


def simulate(cfg: Config, card: gpus.Card, count: int, *, estimate: bool = False) -> StepPlan:
    """Returns the plan of `count` cards; of 0, the run on a CPU."""
    if count:
        return make(cfg, f"{card.name}x{count}", estimate=estimate)
    micro = cfg.train.global_batch
    chosen = StepCandidate(strategy="single", mesh="1x1", remat="none", micro_batch=micro, accumulation=1)
    return StepPlan(target="cpu", devices=0, per_host=0, compiled=False, chosen=chosen)


def _plan(cfg: Config, on: Hardware) -> StepPlan:
    started = time.monotonic()
    tried = placement_search.choose(cfg, on)
    with phase("planning: memory of validation and evaluation"):
        best, parts, start = _pick(tried, on)
    candidates = tuple(trial.candidate() for trial in tried)
    chosen = candidates[tried.index(best)] if best else None
    return StepPlan(
        **on.figures(),
        precision=precision(cfg, on),
        global_batch=cfg.train.global_batch,
        unit=recipes.outline(cfg).unit,
        host_memory_bytes=max(_host_bytes(tried), start.host_memory_bytes if start else 0),
        plan_seconds=round(time.monotonic() - started, 1),
        candidates=candidates,
        chosen=chosen,
        why=_why(chosen, candidates),
        untimed=next((trial.untimed for trial in tried if trial.untimed), ""),
        remedies=() if best else placement_search.fewer_bits(cfg, on),
        validation=parts.get("validation"),
        generation=parts.get("generation"),
        forward_share=_forward_share(best, parts.get("validation"), on),
        start_hours=start and start.hours,
        start_peak_bytes=start.chosen.peak_bytes if start and start.chosen else 0,
    )


def _pick(
    tried: list[Trial], on: Hardware
) -> tuple[Trial | None, dict[str, EvaluationMemory | None], StartPlan | None]:
    """Returns the best candidate that can also be validated, evaluated and started, the memory of both, and the start.

    One that cannot, not even with one example per device, gets an obstacle in `tried`. Of the others only the chosen
    one is asked: each answer is compiled where the hardware can.
    """
    while best := placement_search.pick(tried):
        assert best.program is not None, "it fits"
        parts = evaluation_memory(best.program, on.limit, on.compile)
        obstacles = [
            f"{part} of one example per device needs {bytes_of(needs.smallest_bytes)} of {bytes_of(on.limit.usable)}"
            for part, needs in parts.items()
            if needs and not needs.largest
        ]
        start = None if obstacles else _start(best.program, on)
        if start and not start.chosen:
            obstacles = [f"the start before the steps: {start.candidates[0].obstacle}"]
        if not obstacles:
            return best, parts, start
        tried[tried.index(best)] = dataclasses.replace(best, fits=False, obstacle=obstacles[0])
    return None, {}, None


def _forward_share(best: Trial | None, validation: EvaluationMemory | None, on: Hardware) -> float:
    if not (best and best.program and validation and on.target):
        return 1.0  # the hours of its steps are not known either
    rows = validation.largest // best.program.placement.data
    return estimates.forward_share(best.program, best.micro_batch, rows, on.target)


def _start(program: StepSpec, on: Hardware) -> StartPlan | None:
    """Returns the plan of a cache wire's start on the placement of its steps."""
    if program.cfg.encoder.kind != "cache":
        return None
    return start_plan.make(program.cfg, on, on.target and Speed.of(on.target.card), program.placement)


def evaluation_memory(
    program: StepSpec, room: memory_limit.MemoryLimit, compile: memory.Compile | None
) -> dict[str, EvaluationMemory | None]:
    passes = {
        "validation": evaluation_memories.validation(program),
        "generation": generation_memory.generation(program),
    }
    return {part: pass_ and evaluation_memories.of(pass_, room, compile=compile) for part, pass_ in passes.items()}


def _host_bytes(tried: Sequence[Trial]) -> int:
    """Returns the host memory of one process: weights stream through it, a checkpoint passes as a whole."""
    program = next((trial.program for trial in tried if trial.program), None)
    if program is None:
        return int(HOST_BYTES)
    state = tree.nbytes(program.state)
    frozen = jax.tree.leaves(program.frozen)
    largest = max((leaf.size // max(1, leaf.shape[0]) * 4 for leaf in frozen), default=0)
    return int(HOST_BYTES + state + 2 * largest)


def _why(chosen: StepCandidate | None, candidates: Sequence[StepCandidate]) -> str:
    if chosen is None:
        return f"nothing fits: {plans.obstacles(candidates)}"
    others = [candidate for candidate in candidates if candidate.fits and candidate is not chosen]
    if not others:
        return "the only one that fits"
    rates = [other.samples_per_second for other in others if other.samples_per_second]
    if chosen.samples_per_second is None or len(rates) < len(others):
        return f"least arithmetic on a device, of {len(others) + 1} that fit; their times are not known"
    second = others[rates.index(max(rates))]
    faster = max(rates) > chosen.samples_per_second
    rank = "as fast as any within 2 %, and the least" if faster else "predicted fastest"
    return (
        f"{rank} of {len(others) + 1} that fit: {chosen.samples_per_second:.1f} samples/s, "
        f"{'beside' if faster else 'next'} {second.name} with {max(rates):.1f}"
    )


def kept(cfg: Config, target: str) -> StepPlan | None:
    """Returns the cached plan of a target; None where there is none. Compiles nothing."""
    plan = plan_cache.read(plan_cache.path(cfg, gpus.parse(target).name))
    return _timed(plan, cfg) if plan else None


def _timed(plan: StepPlan, cfg: Config) -> StepPlan:
    """Returns a plan with what it is not cached with: a run's steps, their hours, those of its validations.

    What a frozen model computes before the first step (`validation.caching_key`) is in no hours: the number of examples
    is not known.
    """
    steps, share = cfg.train.steps, validation_share(cfg)

    def timed(option: StepCandidate) -> StepCandidate:
        return dataclasses.replace(option, hours=steps * option.step_seconds / 3600 if option.step_seconds else None)

    chosen = plan.chosen and timed(plan.chosen)
    hours = chosen.hours if chosen else None
    return dataclasses.replace(
        plan,
        steps=steps,
        hours=hours,
        validation_hours=None if hours is None or share is None else hours * share * plan.forward_share,
        caching_key=validation.caching_key(cfg),
        candidates=tuple(map(timed, plan.candidates)),
        chosen=chosen,
    )


def validation_share(cfg: Config) -> float | None:
    """Returns examples of a run's validations, by pass, over those of its steps; None where they take all there are."""
    train, examples = cfg.train, run_folder.validation_examples(cfg)
    if not examples:
        return None
    due = sum(preflight.is_validated(train, step) for step in range(1, train.steps + 1))
    passes = 2 * len(config.tasks(cfg)) if cfg.recipe == "latentwire" else 1  # with the right text and another's
    return due * passes * examples / (train.steps * train.global_batch)
