"""Plan of a run without steps: whether its start fits on given devices, what it takes, and what its messages save.

The two programs that need most memory, a batch of texts read twice and a batch written, are compiled for the devices.
FLOPs and seconds are read from their jaxprs (`training.traced_costs`), at the roofline's shares of a card's peaks or at
what was measured of a CPU.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax import recipes
from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.progress import phase
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.models import cache_code
from lw_jax.planning import gpus, host_memory, planner
from lw_jax.planning.placement_search import Hardware
from lw_jax.planning.roofline import BANDWIDTH_FRACTION, MATMUL_FRACTION
from lw_jax.recipes import cache_start
from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.recipes.wire_shapes import SHARED_PREFIX
from lw_jax.training import memory_limit, traced_costs
from lw_jax.training.memory import Compile, bytes_of
from lw_jax.training.traced_costs import Costs
from sharding import place
from sharding import placement as placements
from sharding.placement import Placement

TEXT = 1000  # tokens of the text whose reading and writing are told
AGAIN = 24  # tokens that ask for a text's repetition, assumed where no tokenizer is at hand
SOLVES = 2  # of a text's numbers until a step is found, mostly
_PEAKS = {"bfloat16": "bf16", "float32": "tf32"}  # JAX's name of factors -> the arithmetic of `Card.peak` by default


@dataclasses.dataclass(frozen=True)
class Speed:
    """What one device reaches, in FLOP/s and bytes/s."""

    products: dict[str, float]  # by JAX's name of their factors
    exact: float  # of fp32 at the highest precision
    bandwidth: float

    def seconds(self, costs: Costs) -> float:
        """Returns the seconds of a program."""
        rates = self.products
        each = (
            one.times * max(one.flops / rates.get(one.dtype, self.exact), one.bytes / self.bandwidth)
            for one in costs.products
        )
        return sum(each) + costs.moved / self.bandwidth


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


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One placement of all readers."""

    strategy: str
    mesh: str
    data: int
    model: int
    devices_used: int
    peak_bytes: int  # of the fullest device
    fits: bool
    obstacle: str
    readers: dict[str, ReaderPlan]

    def overrides(self) -> dict[str, str | int]:
        """Returns, by path, the configuration values that make a run of it."""
        return {"mesh.placement": self.strategy, "mesh.data": self.data, "mesh.model": self.model}


@dataclasses.dataclass(frozen=True)
class StartPlan:
    """What `plan` prints of a run without steps."""

    target: str
    devices: int
    hosts: int
    per_host: int
    compiled: bool
    why_not_compiled: str
    memory_bytes: int
    limit_bytes: int
    rows: int  # texts at once
    tokens: int  # of a text, at most
    texts: int
    ratio: int
    plan_seconds: float
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    hours: float | None
    host_memory_bytes: int


def of_target(cfg: Config, target: str, *, estimate: bool = False) -> StartPlan:
    """Returns the plan of a target ("h100x1").

    Raises:
        UserError: the target is not known, has several nodes, or its estimate needs more virtual CPU devices.
    """
    wanted = gpus.parse(target)
    planner.check_processes(cfg, wanted.devices, wanted.hosts)
    why = ""
    try:
        hardware = planner.absent(cfg, wanted, compiler=not estimate)
    except gpus.CompilerAbsent as error:
        hardware, why = planner.absent(cfg, wanted, compiler=False), str(error)
    return make(cfg, hardware, wanted.name, speed=speed_of(hardware), why_not_compiled=why)


def of_cpu(cfg: Config, speed: Speed) -> StartPlan:
    """Returns the plan of this machine's CPU, whose speed was measured."""
    memory = int(cfg.mesh.memory_gb * 1e9) or host_memory.available() or 0
    room = memory_limit.of_devices(cfg, memory)
    return make(cfg, Hardware(jax.devices("cpu")[:1], room), "cpu", speed=speed)


def make(cfg: Config, hardware: Hardware, name: str, *, speed: Speed | None, why_not_compiled: str = "") -> StartPlan:
    """Returns the plan for these devices; without `hardware.compile` its memory too is arithmetic."""
    begun, found, room = time.monotonic(), [], hardware.room
    assert room is not None, "planning needs the devices' memory"
    for placed in _placements(cfg, hardware):
        found.append(_measure(cfg, placed, hardware, speed))
        if found[-1].fits:
            break  # the fewest devices a reader: the others hold copies that share the texts
    chosen = found[-1] if found[-1].fits else None
    seconds = [one.seconds for one in chosen.readers.values()] if chosen else []
    hosts = hardware.target.hosts if hardware.target else 1
    rows, tokens = _sizes(cfg, placed)
    return StartPlan(
        target=name,
        devices=len(hardware.devices),
        hosts=hosts,
        per_host=len(hardware.devices) // hosts,
        compiled=hardware.compile is not None,
        why_not_compiled=why_not_compiled,
        memory_bytes=room.memory,
        limit_bytes=room.usable,
        rows=rows,
        tokens=tokens,
        texts=cfg.encoder.texts,
        ratio=cfg.encoder.ratio,
        plan_seconds=round(time.monotonic() - begun, 1),
        candidates=tuple(found),
        chosen=chosen,
        hours=sum(filter(None, seconds)) / 3600 if seconds and all(seconds) else None,
        host_memory_bytes=_host_bytes(cfg, placed),
    )


def speed_of(hardware: Hardware) -> Speed | None:
    """Returns what a card reaches; None for one whose peaks are not known."""
    if hardware.target is None:
        return None
    card = hardware.target.card
    rates = {name: card.peak.get(word, card.peak["fp32"]) * MATMUL_FRACTION for name, word in _PEAKS.items()}
    return Speed(rates, card.peak["fp32"] * MATMUL_FRACTION, card.bandwidth * BANDWIDTH_FRACTION)


def _placements(cfg: Config, hardware: Hardware) -> Iterator[Placement]:
    """Yields the configured placement, or those that a run tries: ever more devices a reader (`planner.settle`)."""
    readers, mesh, devices = recipes.reader_bytes(cfg), cfg.mesh, hardware.devices
    local = len(devices) // (hardware.target.hosts if hardware.target else 1)
    asked = [(mesh.placement, mesh.data, mesh.model)]
    if mesh.placement == "auto":
        sizes = [model for model in range(1, local + 1) if local % model == 0]
        asked = [("tensor" if model > 1 else "replicate", len(devices) // model, model) for model in sizes]
    for strategy, data, model in asked:
        placed = placements.place(strategy, readers, data=data, model=model, devices=devices)
        yield dataclasses.replace(placed, stands_for="gpu" if hardware.target else "")


def _sizes(cfg: Config, placed: Placement) -> tuple[int, int]:
    """Returns how many texts the start reads at once, and the tokens of the longest."""
    rows = cache_start.ROWS["cpu" if placed.platform == "cpu" else "gpu"]
    return place.round_up(rows, placed.data), cfg.data.context_tokens


def _measure(cfg: Config, placed: Placement, hardware: Hardware, speed: Speed | None) -> Candidate:
    """Returns what the start needs on a placement; nothing is compiled where the weights alone are too large."""
    own = config.with_remat(cfg, "none")
    recipe, room = recipes.make_whole(own, placed, outline=True), hardware.room
    assert room is not None
    frozen, codes = recipe.abstract().frozen, recipe.abstract().trainable["codes"]
    held = {
        name: place.device_bytes(place.place_shapes(frozen[name], recipe.shardings().frozen[name])) for name in frozen
    }
    together: dict[Any, int] = {}
    for name, at in placed.readers.items():
        together[at.mesh] = together.get(at.mesh, 0) + held[name] + place.device_bytes(codes[name])
    fits_alone = max(together.values()) <= room.usable
    compiles = hardware.compile if fits_alone else None
    readers = {name: _plan_reader(recipe, name, compiles, speed, held[name]) for name in placed.readers}
    peaks = {
        name: together[at.mesh] + max(one.reading.peak_bytes, one.writing.peak_bytes, one.basis_bytes)
        for (name, at), one in zip(placed.readers.items(), readers.values(), strict=True)
    }
    fullest = max(peaks, key=lambda name: peaks[name])
    obstacle = (
        "" if peaks[fullest] <= room.usable else f"{fullest}: {bytes_of(peaks[fullest])} of {bytes_of(room.usable)}"
    )
    mesh = placed.readers[fullest].mesh
    return Candidate(
        strategy="single" if placed.devices == 1 else placed.strategy,
        mesh=f"{mesh.shape['data']}x{mesh.shape['model']}",
        data=placed.data,
        model=mesh.shape["model"],
        devices_used=placed.devices,
        peak_bytes=peaks[fullest],
        fits=not obstacle,
        obstacle=obstacle,
        readers=readers,
    )


def _plan_reader(
    recipe: CacheWire, name: str, compiles: Compile | None, speed: Speed | None, weights: int
) -> ReaderPlan:
    cfg, model, placed = recipe.cfg, recipe.wire.readers[name].config, recipe.placement
    rows, tokens = _sizes(cfg, placed)
    code, values = recipe.abstract().trainable["codes"][name], 2 * model.layers * model.kv_heads * model.head_dim
    own = recipes.make_whole(cfg, placed.on_one_device(), outline=True)  # what a device computes
    each = values * jnp.dtype(own.abstract().frozen[name]["embed"].dtype).itemsize
    each //= max(1, model.kv_heads // own.wire.readers[name].config.kv_heads)

    def work(rows: int, tokens: int) -> dict[bool, Work]:
        found = {}
        for writes, (function, given) in _programs(own, name, rows, tokens).items():
            costs = traced_costs.trace(function, *given)
            found[writes] = Work(costs.peak, costs.peak, costs.flops, speed and speed.seconds(costs))
        return found

    batch, text = work(-(-rows // placed.data), tokens), work(1, TEXT)
    if compiles is not None:
        for writes, (function, given) in _programs(recipe, name, rows, tokens).items():
            with phase(f"planning: compiling what {'writes' if writes else 'reads'} {rows} texts for {name}"):
                needs = compiles(jax.jit(function).lower(*given)).memory_analysis()
            peak = needs.argument_size_in_bytes + needs.temp_size_in_bytes + needs.output_size_in_bytes - weights
            batch[writes] = dataclasses.replace(batch[writes], peak_bytes=max(peak, 0))
    runs, width = _runs(cfg, rows, placed.platform), code["basis"].shape[0]
    basis = (8 * (width + cache_code.MORE) + 2 * width) * values * runs.tokens
    read, write = batch[False], batch[True]
    seconds = None
    if speed and read.seconds and write.seconds:
        seconds = runs.readings * read.seconds + runs.writings * (write.seconds - read.seconds) + basis / speed.exact
    return ReaderPlan(
        weights_bytes=weights,
        code_bytes=place.device_bytes(code),
        reading=read,
        writing=write,
        basis_bytes=4 * values * (4 * (width + cache_code.MORE) + 3 * cache_start.CHUNK),
        flops=runs.readings * read.flops + runs.writings * (write.flops - read.flops) + basis,
        seconds=seconds,
        read_seconds=(text[False].seconds or 0.0) / 2 if speed else None,  # it is read twice there
        write_seconds=text[True].seconds,
        text_bytes=TEXT * each,
        message_bytes=-(-TEXT // max(cfg.encoder.ratio, 1)) * each,
    )


class _Runs(NamedTuple):
    """How often the start runs its programs for one reader, about."""

    readings: float  # of a batch, twice; once is half
    writings: float  # of a batch that was read
    tokens: int  # that the basis is fitted to


def _runs(cfg: Config, rows: int, platform: str) -> _Runs:
    texts, kind = cfg.encoder.texts, "cpu" if platform == "cpu" else "gpu"
    held = min(max(texts // cache_start.PART_HELD_OUT, 1), cache_start.MOST_HELD_OUT[kind])
    train, found = texts - held, len(cache_start.RATES) + (cfg.encoder.ratio > 1)  # steps, one of them either way
    twice = train / cache_start.TWICE + held
    readings = (twice + (train - twice) / 2) / rows
    writings = found * SOLVES * held / rows
    return _Runs(readings, writings, train * cfg.data.context_tokens)


def _programs(recipe: CacheWire, name: str, rows: int, tokens: int) -> dict[bool, tuple[Callable[..., Any], tuple]]:
    """Returns what reads a batch of texts twice, and what writes it (True), with the shapes of their arguments."""
    functions, mesh = CacheFunctions(recipe.wire, recipe.placement), recipe.placement.readers[name].mesh
    model, every = recipe.wire.readers[name].config, place.whole(mesh)
    params = place.place_shapes(recipe.abstract().frozen[name], recipe.shardings().frozen[name])
    shapes = recipe.abstract().trainable["codes"][name]
    code = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=every), shapes)

    def field(rows: int, tokens: int, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
        kinds = (("ids", jnp.int32), ("mask", bool))
        return {key: jax.ShapeDtypeStruct((rows, tokens), dtype, sharding=sharding) for key, dtype in kinds}

    fields = {"own": field(rows, tokens, NamedSharding(mesh, P("data")))}
    fields |= {"before": field(1, SHARED_PREFIX, every), "again": field(1, AGAIN, every)}
    count = jax.ShapeDtypeStruct((model.layers, rows, model.kv_heads), jnp.int32, sharding=every)

    def read(params: Any, fields: Any) -> Any:
        return functions.read_states(params, fields, name, True)

    def write(params: Any, code: Any, fields: Any, count: jax.Array, step: jax.Array) -> Any:
        reading = functions.read_twice(params, fields, name, True)
        return functions.encode(code, reading, fields["before"]["mask"], [count], step, name, True)

    step = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=every)
    return {False: (read, (params, fields)), True: (write, (params, code, fields, count, step))}


def _host_bytes(cfg: Config, placed: Placement) -> int:
    """Returns the host memory of the process: a layer of weights as it streams, the scores of all texts, codes."""
    recipe = recipes.make_whole(config.with_remat(cfg, "none"), placed, outline=True)
    models = [one.config for one in recipe.wire.readers.values()]
    scores = max(4 * cfg.encoder.texts * cfg.data.context_tokens * one.layers * one.kv_heads for one in models)
    codes = sum(map(place.device_bytes, recipe.abstract().trainable["codes"].values()))
    layer = max(math.prod(leaf.shape[1:]) * 4 for leaf in jax.tree.leaves(recipe.abstract().frozen))
    return int(planner.HOST_BYTES + 2 * scores + 2 * codes + 2 * layer)
