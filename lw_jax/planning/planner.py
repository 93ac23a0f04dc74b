"""Plans: the placement, recomputation and micro-batch with which a configuration runs on given devices."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lw_jax import recipes
from lw_jax.core import config, processes, validation
from lw_jax.core import precision as precision_of
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import DTYPES
from lw_jax.core.progress import phase
from lw_jax.planning import (
    decode_layout,
    gpus,
    host_memory,
    placement_search,
    plan_cache,
    remedies,
    workload,
)
from lw_jax.planning.generation_memory import generation
from lw_jax.planning.gpus import Target
from lw_jax.planning.placement_search import Candidate, Hardware
from lw_jax.training import evaluation_memory as evaluation_memories
from lw_jax.training import memory, memory_limit, preflight
from lw_jax.training.evaluation_memory import EvaluationMemory
from lw_jax.training.memory import bytes_of
from lw_jax.training.step_spec import StepSpec
from sharding import placement as placements
from sharding.errors import PlacementError
from sharding.placement import Placement

Plan = dict[str, Any]  # what `plan --json` prints

SIZES = {"single": 1, "dual": 2, "quad": 4}  # words for a number of cards on one node
HOST_BYTES = 6e9  # Python, JAX, CUDA and tokenised data, of one process: assumed, not measured


def inspect(cfg: Config) -> list[preflight.Finding]:
    """Returns problems of the configuration that do not depend on the hardware."""
    return preflight.inspect(cfg, recipes.outline(config.with_remat(cfg, "none")))


def resolve_target(word: str, *, config: str) -> str:
    """Returns the target to plan for: `word`, or for single, dual and quad that many of the configuration's card."""
    if word and word not in SIZES:
        return word
    stem = Path(config.partition(":")[0]).stem
    card = re.fullmatch(r"(?:\d+x)?([a-z]\w*?)x\d+", stem)
    if card is None:
        asked = f"--target {word}" if word else "--target is missing and"
        raise UserError(f"{asked}: configs/{stem}.py names no card; write card and number, as --target h100x4.")
    return f"{card[1]}x{SIZES[word]}" if word else stem


def make(cfg: Config, target: str = "", *, estimate: bool = False) -> Plan:
    """Returns the plan of a target ("h100x4"), or of this machine's devices; compiled plans are cached on disk.

    Raises:
        UserError: the target is not known, or an estimate needs more virtual CPU devices than there are.
        PlacementError: the configured placement does not go with the target's nodes.
    """
    if not target:
        check_processes(cfg, jax.device_count(), jax.process_count())
        return _cached(cfg, "here", lambda: _plan(cfg, here(cfg), "here", hosts=jax.process_count()))
    wanted = gpus.parse(target)
    check_processes(cfg, wanted.devices, wanted.hosts)
    if estimate:
        return _timed(_plan(cfg, absent(cfg, wanted, compiler=False), wanted.name, hosts=wanted.hosts), cfg)

    def compute() -> Plan:
        try:
            return _plan(cfg, absent(cfg, wanted), wanted.name, hosts=wanted.hosts)
        except gpus.CompilerAbsent as error:
            found = _plan(cfg, absent(cfg, wanted, compiler=False), wanted.name, hosts=wanted.hosts)
            return found | {"why_not_compiled": str(error)}

    return _cached(cfg, wanted.name, compute)


def check_processes(cfg: Config, devices: int, processes: int) -> None:
    """Refuses what cannot run over so many processes, one a node.

    Raises:
        PlacementError: the configured placement.
        UserError: another key.
    """
    validation.check_processes(cfg, processes)
    if cfg.mesh.placement != "auto":
        mesh = cfg.mesh
        placements.check_processes(mesh.placement, mesh.data, mesh.model, devices=devices, processes=processes)


def here(cfg: Config) -> Hardware:
    """Returns this machine's devices as hardware to plan for."""
    devices, hosts = jax.devices(), jax.process_count()
    card = gpus.of_device(jax.local_devices()[0])  # of another process's JAX refuses to say the memory
    return Hardware(devices, memory_limit.local(cfg), Target(card, len(devices) // hosts, hosts) if card else None)


def precision(cfg: Config, hardware: Hardware | None = None) -> str:
    """Returns the precision in which this machine's card, or the target's, runs the configured dtypes."""
    hardware = here(cfg) if hardware is None else hardware
    card = hardware.target.card if hardware.target else hardware.devices[0]
    if getattr(card, "platform", "gpu") == "cpu":
        factors = [workload.arithmetic(cfg, "cpu"), precision_of.of(cfg.compute.dtype, "cpu").factors]
        return precision_of.describe_cpu(factors)
    own = precision_of.resolve(cfg.compute.dtype, "gpu")
    asked = {own, *(llm.weights for llm in cfg.llms.values() if llm.weights in DTYPES)}
    return gpus.describe_precision(sorted(asked), getattr(card, "capability", getattr(card, "compute_capability", "")))


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
    hardware = here(cfg)
    cfg, placed = _resolve_placement(config.with_remat(cfg, "none") if reading else cfg, hardware, reading=reading)
    host_memory.check(recipes.reader_bytes(cfg), placed)
    return decode_layout.resolve_layers(cfg, placed, hardware.room), placed


def _resolve_placement(cfg: Config, hardware: Hardware, *, reading: bool) -> tuple[Config, Placement]:
    """Resolves compute.remat and the placement."""
    readers, mesh = recipes.reader_bytes(cfg), cfg.mesh
    if mesh.placement != "auto" and cfg.compute.remat != "auto":
        return cfg, _place_configured(cfg, readers)
    if reading or hardware.room is None:
        remat = "none" if cfg.compute.remat == "auto" else cfg.compute.remat
        return config.with_remat(cfg, remat), _place_uncompiled(cfg, readers, hardware, reading=reading)
    found = make(cfg)
    best = found["chosen"]
    if best is None:
        advice = remedies.describe(found["remedies"])
        raise PlacementError(
            placement_search.nothing_fits(found["candidates"], len(hardware.devices), hardware.room, advice)
        )
    placed = placements.place(best["strategy"], readers, data=best["data"], model=best["model"])
    return config.with_remat(cfg, best["remat"]), placed


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
        own = "--config.mesh.placement=auto --config.mesh.data=-1 --config.mesh.model=1 --config.train.micro_batch=0"
        raise PlacementError(
            f"{error}. This machine has {count} {jax.devices()[0].device_kind}. Whether it fits elsewhere: python "
            f"run.py plan --config FILE --target h100x{wanted}; on whatever cards there are: --config "
            f"configs/large.py, or {own}; on virtual devices of a CPU: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        ) from error


def _place_uncompiled(cfg: Config, readers: Mapping[str, int], hardware: Hardware, *, reading: bool) -> Placement:
    """Returns the configured placement, data parallel, or for evaluation the smallest model axis that fits."""
    mesh, count = cfg.mesh, len(hardware.devices)
    if mesh.placement != "auto":
        return _place_configured(cfg, readers)
    if not reading:
        rows = placement_search.data_axis(cfg, count, jax.process_count())
        return placements.place("replicate", readers, data=rows)
    local = count // jax.process_count()  # the model axis stays inside a process
    for model in (n for n in range(1, local + 1) if local % n == 0):
        table = "tensor" if model > 1 else "replicate"
        placed = placements.place(table, readers, data=count // model, model=model)
        if hardware.room is None or _held(cfg, placed, readers, local) <= hardware.room.usable:
            return placed
    assert hardware.room is not None
    most = "all of them" if local == count else f"the {local} of each process"
    raise PlacementError(
        f"the readers do not fit on {count} devices of {bytes_of(hardware.room.memory)}, split over {most}; use more "
        "devices, or raise mesh.target_utilisation"
    )


def _held(cfg: Config, placed: Placement, readers: Mapping[str, int], local: int) -> int:
    """Returns the bytes of weights on the fullest device; what a run without steps computes is small beside them."""
    if not cfg.train.steps:
        return host_memory.held(readers, placed) // local
    return memory.placed_bytes(StepSpec(cfg, recipes.make(cfg, placed, outline=True)))


def simulate(cfg: Config, card: gpus.Card, count: int, *, estimate: bool = False) -> Plan:
    """Returns the plan of `count` cards; of 0, the run on a CPU."""
    if count:
        return make(cfg, f"{card.name}x{count}", estimate=estimate)
    own, placed = config.with_remat(cfg, "none"), placements.place("single", recipes.reader_bytes(cfg))
    program = StepSpec(own, recipes.make(own, placed, outline=True))
    chosen = {"strategy": "single", "mesh": "1x1", "remat": "none", "accumulation": program.accumulation(0)}
    chosen["micro_batch"] = cfg.train.global_batch
    return {"target": "cpu", "devices": 0, "compiled": False, "chosen": chosen}


def absent(cfg: Config, target: Target, *, compiler: bool = True) -> Hardware:
    """Returns stand-ins for a target's devices; without the compiler, CPU devices that only give shapes shardings."""
    room = memory_limit.of_devices(cfg, target.card.memory_bytes)
    if compiler:
        return Hardware(gpus.compile_devices(target), room, target, gpus.compile_lowered)
    devices = jax.devices("cpu")
    if len(devices) < target.devices:
        raise UserError(
            f"target {target.name}: an estimate for {target.devices} devices needs as many virtual CPU devices, this "
            f"process has {len(devices)}; set JAX_NUM_CPU_DEVICES={target.devices}"
        )
    return Hardware(devices[: target.devices], room, target, None)


def _plan(cfg: Config, hardware: Hardware, name: str, *, hosts: int) -> Plan:
    started = time.monotonic()
    found = placement_search.choose(cfg, hardware)
    with phase("planning: memory of validation and evaluation"):
        best, measured = _pick(found, hardware)
    rows = [_row(cfg, candidate) for candidate in found]
    chosen = rows[found.index(best)] if best else None
    room = hardware.room
    assert room is not None
    return {
        "target": name,
        "devices": len(hardware.devices),
        "hosts": hosts,
        "per_host": len(hardware.devices) // hosts,
        "compiled": hardware.compile is not None,
        "precision": precision(cfg, hardware),
        "memory_bytes": room.memory,
        "limit_bytes": room.usable,
        "global_batch": cfg.train.global_batch,
        "unit": list(recipes.unit(cfg)),
        "host_memory_bytes": _host_bytes(found),
        "plan_seconds": round(time.monotonic() - started, 1),
        "candidates": rows,
        "chosen": chosen,
        "why": _why(chosen, rows),
        "untimed": next((candidate.untimed for candidate in found if candidate.untimed), ""),
        **measured,
        "remedies": [] if best else remedies.fewer_bits(cfg, hardware),
    }


def _pick(found: list[Candidate], hardware: Hardware) -> tuple[Candidate | None, Plan]:
    """Returns the best candidate that can also be validated and evaluated, and the memory of both.

    One that cannot, not even with one example per device, gets an obstacle in `found`. Of the others only the chosen
    one is asked: each answer is compiled where the hardware can.
    """
    room = hardware.room
    assert room is not None, "planning needs the devices' memory"
    while best := placement_search.pick(found):
        assert best.program is not None, "it fits"
        memory_of_parts, obstacle = {}, ""
        for part, one in evaluation_memory(best.program, room, hardware.compile).items():
            memory_of_parts[part] = one and dataclasses.asdict(one) | {"description": one.describe(room, part)}
            if one and not one.largest:
                needs = f"{bytes_of(one.smallest_bytes)} of {bytes_of(room.usable)}"
                obstacle = obstacle or f"{part} of one example per device needs {needs}"
        if not obstacle:
            return best, memory_of_parts
        found[found.index(best)] = dataclasses.replace(best, obstacle=obstacle)
    return None, {"validation": None, "generation": None}


def evaluation_memory(
    program: StepSpec, room: memory_limit.MemoryLimit, compile: memory.Compile | None
) -> dict[str, EvaluationMemory | None]:
    """Returns the memory of validation, and of generation where the recipe's evaluation generates."""
    passes = {"validation": evaluation_memories.validation(program), "generation": generation(program)}
    return {part: one and evaluation_memories.of(one, room, compile=compile) for part, one in passes.items()}


def _row(cfg: Config, candidate: Candidate) -> Plan:
    needs, guess, placed = candidate.needs, candidate.estimate, candidate.placement
    seconds = candidate.times.total if candidate.times else None
    cut = candidate.program.cut(needs.accumulation) if candidate.program and needs else None
    row = {
        "strategy": candidate.strategy,
        "mesh": candidate.mesh,
        "data": placed.data if placed and not placed.on_several_meshes else -1,
        "model": placed.learner.shape["model"] if placed and candidate.strategy in ("tensor", "split") else 1,
        "devices_used": placed.devices if placed else 0,
        "remat": candidate.remat,
        "fits": candidate.fits,
        "obstacle": candidate.obstacle,
        "micro_batch": needs.micro_batch if needs else 0,
        "accumulation": needs.accumulation if needs else 0,
        "rows": cut.rows if cut else 0,
        "filling": cut.describe() if cut else "",
        "peak_bytes": needs.peak if needs else 0,
        "weights_bytes": needs.weights if needs else 0,
        "trainable_bytes": needs.trainable if needs else 0,
        "optimizer_bytes": needs.optimizer if needs else 0,
        "batch_bytes": needs.batch if needs else 0,
        "activation_bytes": needs.activations if needs else 0,
        "flops": candidate.flops,
        "collective_bytes": candidate.collective_bytes,
        "moved_bytes": candidate.moved_bytes,
        "seconds": dataclasses.asdict(candidate.times) if candidate.times else None,
        "step_seconds": seconds,
        "samples_per_second": cfg.train.global_batch / seconds if seconds else None,
        "estimate": None,
    }
    if guess:
        row["estimate"] = {
            "peak_bytes": guess.needs.peak,
            "flops": guess.flops,
            "collective_bytes": guess.collective_bytes,
            "step_seconds": guess.times.total if guess.times else None,
        }
    return row


def _host_bytes(found: Sequence[Candidate]) -> int:
    """Returns the host memory of one process: weights stream through it, a checkpoint passes as a whole."""
    program = next((candidate.program for candidate in found if candidate.program), None)
    if program is None:
        return int(HOST_BYTES)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state()))
    frozen = jax.tree.leaves(program.frozen())
    largest = max((leaf.size // max(1, leaf.shape[0]) * 4 for leaf in frozen), default=0)
    return int(HOST_BYTES + state + 2 * largest)


def _why(chosen: Plan | None, rows: Sequence[Plan]) -> str:
    if chosen is None:
        return "nothing fits: " + "; ".join(f"{row['strategy']} {row['mesh']}: {row['obstacle']}" for row in rows)
    others = [row for row in rows if row["fits"] and row is not chosen]
    if not others:
        return "the only one that fits"
    if any(row["samples_per_second"] is None for row in [chosen, *others]):
        return f"least arithmetic on a device, of {len(others) + 1} that fit; their times are not known"
    second = max(others, key=lambda row: row["samples_per_second"])
    faster = second["samples_per_second"] > chosen["samples_per_second"]
    rank = "as fast as any within 2 %, and the least" if faster else "predicted fastest"
    return (
        f"{rank} of {len(others) + 1} that fit: {chosen['samples_per_second']:.1f} samples/s, "
        f"{'beside' if faster else 'next'} {second['strategy']} {second['mesh']} with "
        f"{second['samples_per_second']:.1f}"
    )


def kept(cfg: Config, target: str) -> Plan | None:
    """Returns the cached plan of a target; None where there is none. Compiles nothing."""
    found = plan_cache.read(plan_cache.path(cfg, gpus.parse(target).name))
    return _timed(found, cfg) if found else None


def _timed(found: Plan, cfg: Config) -> Plan:
    """Returns a plan with what it is not cached with: a run's steps, their hours, those of its validations.

    What a frozen model computes before the first step (`validation.caching_key`) is in no hours: the number of examples
    is not known.
    """
    steps, share = cfg.train.steps, validation_share(cfg)

    def timed(row: Plan) -> Plan:
        seconds = row["step_seconds"]
        return row | {"hours": steps * seconds / 3600 if seconds else None}

    rows, chosen = list(map(timed, found["candidates"])), found["chosen"] and timed(found["chosen"])
    hours = chosen["hours"] if chosen else None
    validating = None if hours is None or share is None else hours * share
    timing = {"steps": steps, "hours": hours, "validation_hours": validating}
    timing["caching_key"] = validation.caching_key(cfg)
    return found | timing | {"candidates": rows, "chosen": chosen}


def validation_share(cfg: Config) -> float | None:
    """Returns about the time of a run's validations over that of its steps; None for held-out data of unknown size.

    A held-out example, measured once forward, is taken for half of a training example, which has a backward pass too.
    """
    train, examples = cfg.train, preflight.validation_examples(cfg)
    if not examples:
        return None
    due = sum(preflight.is_validated(train, step) for step in range(1, train.steps + 1))
    passes = 2 * len(config.tasks(cfg)) if cfg.recipe == "latentwire" else 1  # with the right text and another's
    return due * passes * examples / 2 / (train.steps * train.global_batch)


def _cached(cfg: Config, name: str, compute: Callable[[], Plan]) -> Plan:
    """Returns the cached plan, else computes and caches it."""
    file, here = plan_cache.path(cfg, name), name == "here"
    kept = plan_cache.read(file)
    # Several processes compile all or none, as XLA shares the work of autotuning among them; the first one's holds.
    if here and not all(processes.gather(kept is not None)):
        kept = None
    own = kept or compute()
    found = processes.from_first(lambda: own) if here else own
    if not kept and "why_not_compiled" not in found:  # the compiler may be installed by the next call
        plan_cache.write(file, found)
    return _timed(found, cfg)


def overrides(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns, by path, the configuration values that make a run of a planned candidate."""
    planned = {"mesh.placement": chosen["strategy"], "mesh.data": -1, "mesh.model": 1}
    if chosen["strategy"] == "split":
        planned["mesh.model"] = chosen.get("model", 1)
    axes = re.fullmatch(r"(\d+)x(\d+)", chosen["mesh"])
    if axes and chosen["strategy"] in ("replicate", "fsdp", "tensor"):  # the others find their axes themselves
        planned |= {"mesh.data": int(axes[1]), "mesh.model": int(axes[2])}
    return planned | {"train.micro_batch": chosen["micro_batch"], "compute.remat": chosen["remat"]}
