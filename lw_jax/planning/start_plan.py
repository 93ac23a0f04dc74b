"""Plan of a cache wire's start, all of a run without steps: whether it fits given devices, and what messages save.

The two programs that need most memory, a batch of texts read twice and a batch written, are compiled for the devices.
FLOPs and seconds are read from their jaxprs (`training.traced_costs`), at the roofline's shares of a card's peaks or at
what was measured of a CPU.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax import recipes
from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.progress import phase
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.models import cache_code, kv_prefix
from lw_jax.planning import hardware, host_memory, placement_search, plans, workload
from lw_jax.planning.hardware import HOST_BYTES, Hardware
from lw_jax.planning.plans import Candidate, Plan
from lw_jax.planning.roofline import Speed
from lw_jax.recipes import cache_start
from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.recipes.wire_shapes import AGAIN, SHARED_PREFIX
from lw_jax.training import memory_limit, out_of_memory, step_costs
from lw_jax.training.memory import Compile, bytes_of, fresh_bytes
from lw_jax.training.traced_costs import Costs, trace
from sharding import place
from sharding import placement as placements
from sharding.placement import Placement

TEXT = 1000  # tokens of the text whose reading and writing are reported
READ, WRITE = "read", "write"  # a batch's two programs
SOLVES = 3  # of a text's numbers until a step is found, mostly


@dataclasses.dataclass(frozen=True)
class Work:
    """One program on one device."""

    peak_bytes: int  # beside the weights
    estimate_bytes: int  # the same by arithmetic
    flops: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class ReaderPlan:
    """One reader's part of the start, and of a text of TEXT tokens; bytes are those of one device."""

    weights_bytes: int
    code_bytes: int  # basis, means, scales and tables
    reading: Work  # a batch of texts, twice
    writing: Work  # the same, chosen, fitted and coded
    basis_bytes: int
    flops: float  # of the whole start
    seconds: float | None
    read_seconds: float | None  # a text of TEXT tokens
    write_seconds: float | None
    text_bytes: int  # its keys and values
    message_bytes: int  # those of a message at encoder.ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartCandidate(Candidate):
    """One placement of all readers."""

    readers: dict[str, ReaderPlan]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartPlan(Plan):
    """Plan of a start."""

    candidates: tuple[StartCandidate, ...] = ()
    chosen: StartCandidate | None
    rows: int  # texts at once
    tokens: int  # of a text, at most
    texts: int
    ratio: int


def of_target(cfg: Config, target: str, *, estimate: bool = False) -> StartPlan:
    """Returns the plan of a target ("h100x1"), or of this machine's GPUs; raises as `hardware.find`."""
    on = hardware.find(cfg, target, estimate=estimate)
    return make(cfg, dataclasses.replace(on, compile=None) if estimate else on, on.target and Speed.of(on.target.card))


def of_cpu(cfg: Config, speed: Speed) -> StartPlan:
    room = memory_limit.of_devices(cfg, host_memory.available() or 0)
    return make(cfg, Hardware(jax.devices("cpu")[:1], room if room.memory else None, name="cpu"), speed)


def make(cfg: Config, on: Hardware, speed: Speed | None, only: Placement | None = None) -> StartPlan:
    """Returns the plan for these devices, or for one placement; without `on.compile` its memory too is arithmetic."""
    begun, candidates = time.monotonic(), []
    for placed in [only] if only else _placements(cfg, on):
        candidates.append(_measure(cfg, placed, on, speed))
        if candidates[-1].fits:
            break  # the fewest devices a reader: the others hold copies that share the texts
    chosen = candidates[-1] if candidates[-1].fits else None
    seconds = [reader.seconds for reader in chosen.readers.values()] if chosen else []
    return StartPlan(
        **on.figures(),
        rows=cache_start.rows_of(placed),
        tokens=cfg.data.context_tokens,
        texts=cfg.encoder.texts,
        ratio=cfg.encoder.ratio,
        plan_seconds=round(time.monotonic() - begun, 1),
        candidates=tuple(candidates),
        chosen=chosen,
        why="the fewest devices a reader" if chosen else f"nothing fits: {plans.obstacles(candidates)}",
        hours=sum(filter(None, seconds)) / 3600 if seconds and all(seconds) else None,
        host_memory_bytes=_host_bytes(cfg, placed),
    )


def _placements(cfg: Config, on: Hardware) -> Iterator[Placement]:
    """Yields the configured placement, or those that a run tries: ever more devices a reader (`resolve_auto`)."""
    readers, mesh, devices = recipes.reader_bytes(cfg), cfg.mesh, on.devices
    configured = [(mesh.placement, mesh.data, mesh.model)]
    searched = placement_search.splits(len(devices), len(devices) // on.hosts)
    for strategy, data, model in searched if mesh.placement == "auto" else configured:
        placed = placements.place(strategy, readers, data=data, model=model, devices=devices)
        yield dataclasses.replace(placed, stands_for="gpu" if on.target else "")


def _measure(cfg: Config, placed: Placement, on: Hardware, speed: Speed | None) -> StartCandidate:
    """Returns what the start needs on a placement; nothing is compiled where the weights alone are too large."""
    resolved = config.with_remat(cfg, "none")
    recipe, room = CacheWire(resolved, placed, outline=True), on.limit
    weights = {name: place.device_bytes(params) for name, params in recipe.placed().frozen.items()}
    codes = recipe.abstract.trainable["codes"]
    together: dict[Any, int] = {}
    for name, component in placed.readers.items():
        together[component.mesh] = together.get(component.mesh, 0) + weights[name] + place.device_bytes(codes[name])
    fits_alone = max(together.values()) <= room.usable
    obstacle = ""

    def plan(compiles: Compile | None) -> dict[str, ReaderPlan]:
        return {name: _plan_reader(recipe, name, compiles, speed, weights[name]) for name in placed.readers}

    try:
        with out_of_memory.detect():
            readers = plan(on.compile if fits_alone else None)
    except out_of_memory.OutOfMemory as error:
        readers, obstacle = plan(None), f"too large for the compiler: {error}"
    peaks = {
        name: together[component.mesh] + max(reader.reading.peak_bytes, reader.writing.peak_bytes, reader.basis_bytes)
        for (name, component), reader in zip(placed.readers.items(), readers.values(), strict=True)
    }
    fullest = max(peaks, key=lambda name: peaks[name])
    peak = peaks[fullest]
    if peak > room.usable:
        obstacle = f"{fullest}: {bytes_of(peak)} of {bytes_of(room.usable)}"
    return StartCandidate(
        strategy="single" if placed.devices == 1 else placed.strategy,
        **plans.layout(placed),
        peak_bytes=peak,
        fits=not obstacle,
        obstacle=obstacle,
        readers=readers,
    )


def _plan_reader(
    recipe: CacheWire, name: str, compiles: Compile | None, speed: Speed | None, weights: int
) -> ReaderPlan:
    cfg, model, placed = recipe.cfg, recipe.wire.readers[name].config, recipe.placement
    rows, tokens = cache_start.rows_of(placed), cfg.data.context_tokens
    code, values = recipe.abstract.trainable["codes"][name], 2 * model.layers * model.kv_heads * model.head_dim
    # What a device computes: of a model over the model axis it reads its part, and codes all.
    local, whole = (CacheWire(cfg, placed.on_one_device(whole=whole), outline=True) for whole in (False, True))
    dtype = local.abstract.frozen[name]["embed"].dtype
    token_bytes = workload.cache_bytes(local.wire.readers[name].config, rows=1, slots=1, dtype=dtype)

    def cost(part: CacheWire, way: str, rows: int, tokens: int) -> Costs:
        function, args = _programs(part, name, rows, tokens)[way]
        return step_costs.once(part, name, way, args, lambda: trace(function, *args))

    def work(rows: int, tokens: int) -> dict[str, Work]:
        read, whole_read = cost(local, READ, rows, tokens), cost(whole, READ, rows, tokens)
        written = cost(whole, WRITE, rows, tokens)
        flops = written.flops - whole_read.flops + read.flops
        read_seconds = write_seconds = None
        if speed:
            read_seconds = speed.predict(read).total
            write_seconds = speed.predict(written).total - speed.predict(whole_read).total + read_seconds
        return {
            READ: Work(read.peak, read.peak, read.flops, read_seconds),
            WRITE: Work(written.peak, written.peak, flops, write_seconds),
        }

    batch, text = work(-(-rows // placed.data), tokens), work(1, TEXT)
    if compiles is not None:
        for way, (function, args) in _programs(recipe, name, rows, tokens).items():
            with phase(f"planning: compiling what {way}s {rows} texts for {name}"):
                program = compiles(jax.jit(function).lower(*args))
            # Not the program's arguments: weights and code are counted once, and JAX drops what is not read.
            peak = place.device_bytes(args[-1] if way == READ else args[2:]) + fresh_bytes(program)
            peak += program.memory_analysis().temp_size_in_bytes
            batch[way] = dataclasses.replace(batch[way], peak_bytes=peak)
    (readings, writings, fitted), width = _runs(cfg, rows, placed.platform), code["basis"].shape[0]
    exact = (16 * (width + cache_code.MORE) + 4 * width) * values * fitted  # the basis
    heads = model.layers * model.kv_heads
    # What messages say of the states: their first numbers and the products of blocks, and the sweeps.
    exact += width * (4 * values + cache_code.SWEEPS * 2 * cache_code.BLOCK * (heads + 1)) * fitted
    sweeps = width * cache_code.SWEEPS * 4 * values * fitted
    read, write = batch[READ], batch[WRITE]
    seconds = None
    if speed and read.seconds and write.seconds:
        seconds = readings * read.seconds + writings * (write.seconds - read.seconds) + exact / speed.exact
        factors = recipe.wire.readers[name].mode.factors or "float32"
        seconds += sweeps / speed.products.get(factors, speed.exact)
    return ReaderPlan(
        weights_bytes=weights,
        code_bytes=place.device_bytes(code),
        reading=read,
        writing=write,
        basis_bytes=4 * values * (4 * (width + cache_code.MORE) + 3 * cache_start.CHUNK),
        flops=readings * read.flops + writings * (write.flops - read.flops) + exact + sweeps,
        seconds=seconds,
        read_seconds=(text[READ].seconds or 0.0) / 2 if speed else None,  # it is read twice there
        write_seconds=text[WRITE].seconds,
        text_bytes=TEXT * token_bytes,
        message_bytes=-(-TEXT // max(cfg.encoder.ratio, 1)) * token_bytes,
    )


def _runs(cfg: Config, rows: int, platform: str) -> tuple[float, float, int]:
    """Returns about how often the start reads a batch twice and writes one, and the tokens that it fits a basis to."""
    texts = cfg.encoder.texts
    held_out = min(max(texts // cache_start.PART_HELD_OUT, 1), cache_start.MOST_HELD_OUT[platform])
    train, steps = texts - held_out, len({cfg.encoder.ratio, *cache_start.RATES}) + 1  # at least one step either way
    writings = steps * SOLVES * held_out / rows
    return texts / rows, writings, train * cfg.data.context_tokens


def _programs(recipe: CacheWire, name: str, rows: int, tokens: int) -> dict[str, tuple[Callable[..., Any], tuple]]:
    """Returns what reads a batch of texts twice, and what writes it, with the shapes of their arguments."""
    functions, mesh = CacheFunctions(recipe.wire, recipe.placement), recipe.placement.readers[name].mesh
    model, replicated = recipe.wire.readers[name].config, place.whole(mesh)
    params, shapes = recipe.placed().frozen[name], recipe.abstract.trainable["codes"][name]
    code = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), shapes)

    def field(rows: int, tokens: int, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
        kinds = (("ids", jnp.int32), ("mask", bool))
        return {key: jax.ShapeDtypeStruct((rows, tokens), dtype, sharding=sharding) for key, dtype in kinds}

    fields = {"own": field(rows, tokens, NamedSharding(mesh, P("data")))}
    fields |= {"before": field(1, SHARED_PREFIX, replicated), "again": field(1, AGAIN, replicated)}
    count = jax.ShapeDtypeStruct((model.layers, rows, model.kv_heads), jnp.int32, sharding=replicated)

    def read(params: Any, fields: Any) -> Any:
        return functions.read_states(params, fields, name)

    def write(params: Any, code: Any, fields: Any, count: jax.Array, step: jax.Array) -> Any:
        reading = functions.read_twice(params, fields, name, True)
        sizes = kv_prefix.all_keys(model, tokens)
        return functions.encode(code, reading, [count], step, name, (sizes,))

    step = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=replicated)
    return {READ: (read, (params, fields)), WRITE: (write, (params, code, fields, count, step))}


def _host_bytes(cfg: Config, placed: Placement) -> int:
    """Returns the host memory of the process: a layer of weights as it streams, the scores of all texts, codes."""
    recipe = CacheWire(config.with_remat(cfg, "none"), placed, outline=True)
    models = [reader.config for reader in recipe.wire.readers.values()]
    scores = max(4 * cfg.encoder.texts * cfg.data.context_tokens * model.layers * model.kv_heads for model in models)
    codes = sum(map(place.device_bytes, recipe.abstract.trainable["codes"].values()))
    layer = max(math.prod(leaf.shape[1:]) * 4 for leaf in jax.tree.leaves(recipe.abstract.frozen))
    return int(HOST_BYTES + 4 * scores + 2 * codes + 2 * layer)
