"""The verb `bench`: seconds of what a configuration does, beside what this machine's products and memory reach.

Weights and tokens are random and a step's batch is at the configuration's limits, so that nothing is fetched and no
word is padded; `input` and `load` read the configuration's own data and weights.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from lw_jax import choice, fit, memory, plan, recipes, sources, timing, weights
from lw_jax.core import runtime
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import EXACT, Tree, reader_dtype
from lw_jax.data.loader import Loader
from lw_jax.models import decoder, wire
from lw_jax.program import Program
from lw_jax.recipes import pretrained
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.timing import Ceilings, Spread
from sharding import place
from sharding.placement import Placement
from sharding.rules import path_of

FILE = "bench.json"
PARTS = {
    "load": "reads the frozen weights of the configuration into their shards",
    "step": "compiles and takes the training step",
    "encode": "writes texts as latents",
    "answer": "lets each reader answer, token by token with its cache",
    "input": "makes training batches while nothing computes",
}
FREE = ("step", "encode", "answer")  # parts that read no file
TOKENS = 256  # different ids of a random batch: every vocabulary has them, and equal ones would meet in one row
BATCHES = 32  # of `input`
BLOCK = 1 << 24  # bytes read at once where nothing but the disk is timed


@dataclasses.dataclass(frozen=True)
class Request:
    """The words of the command line that ask for a benchmark."""

    parts: tuple[str, ...]  # some of PARTS; none: those that need nothing that is not here
    repeats: int
    as_json: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing measured; what does not apply is None, and 0 is a measurement."""

    part: str
    subject: str  # the recipe, or a reader's name
    what: str  # for people, with every size that decides the time
    seconds: Spread | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    flops: float | None = None  # of all devices, the model's own arithmetic: nothing recomputed
    of_matmul: float | None = None  # share of the measured ceiling
    bytes: float | None = None  # that must be read at least, on a device
    of_bandwidth: float | None = None
    peak_bytes: float | None = None  # of the fullest device
    peak_from: str = (
        ""  # "device" | "compiled" (the compiler's figure) | "host": on it, beside the arrays if they lie there
    )
    compile_seconds: float | None = None  # traced, lowered and compiled with an empty cache
    cached_seconds: float | None = None  # the same, the program found on disk
    padding: float | None = None  # share of positions that hold no token
    why_not: str = ""  # what stood in the way of measuring


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path, request: Request) -> int:
    """Measures the parts asked for, prints them and writes WORKDIR/bench.json.

    Raises:
        UserError: several processes, a part that the recipe does not have, or one that needs what cannot be had.
    """
    del resolved
    if runtime.start():
        raise UserError(f"{jax.process_count()} processes: measure in one, on the devices of one machine")
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    cfg, placement = plan.settle(cfg)
    found = Bench(cfg, placement, request.repeats)
    rows: list[Row] = []
    for part in request.parts or found.parts:
        print(f"{part}: {PARTS[part]} ...", file=sys.stderr, flush=True)
        rows += found.measure(part, asked=bool(request.parts))
    told = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "device": runtime.describe(),
        "devices": placement.devices,
        "placement": placement.describe(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
        | {"python": platform.python_version()},
        "environment": {name: os.environ[name] for name in ("XLA_FLAGS", "GLIBC_TUNABLES") if name in os.environ},
        "ceilings": dataclasses.asdict(found.ceilings),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    text = json.dumps(told, indent=2) + "\n"
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / FILE).write_text(text, "utf-8")
    print(text if request.as_json else table(told["device"], found.ceilings, rows), end="")
    return 0


class Bench:
    """One configuration on this machine's devices."""

    def __init__(self, cfg: Config, placement: Placement, repeats: int):
        self.cfg, self.placement, self.repeats = cfg, placement, repeats
        self.recipe: Any = recipes.make(cfg, placement, outline=True)
        self.ceilings: Ceilings = timing.ceilings(_arithmetic(cfg))

    @property
    def parts(self) -> list[str]:
        """Returns the parts that this recipe has, in the order in which they disturb each other least."""
        wire = isinstance(self.recipe, LatentWire)
        return [part for part in PARTS if (part != "load" or self.cfg.llms) and (wire or part not in FREE[1:])]

    def measure(self, part: str, *, asked: bool = True) -> list[Row]:
        """Returns a part's rows; unless it was `asked` for, none of its files is fetched.

        Raises UserError for a part that the recipe does not have.
        """
        if part not in self.parts:
            have = ", ".join(self.parts)
            raise UserError(f"--parts {part}: recipe {self.cfg.recipe!r} has {have}; name some of these.")
        if part in FREE or asked:
            return getattr(self, part)()
        if missing := self._missing():
            return [Row(part, self.cfg.recipe, "", why_not=f"{missing} is not on this machine; --parts {part} gets it")]
        try:
            return getattr(self, part)()
        except UserError as error:
            return [Row(part, self.cfg.recipe, "", why_not=str(error))]

    def _missing(self) -> str:
        """Returns a model or text of the configuration that would have to be fetched first; empty: none."""
        spec = self.cfg
        named = [*(llm.source for llm in spec.llms.values()), spec.encoder.source if spec.llms else ""]
        absent = [source for source in named if source and pretrained.cached(spec, source) is None]
        hub = [text for text in (spec.data.train, spec.data.validation) if text.startswith("hub:")]
        return next(iter([*absent, *hub]), "")

    # --- the training step

    def step(self) -> list[Row]:
        """Compiles the step twice, from an empty cache and from a filled one, and takes it."""
        cfg, widths = self.cfg, self.recipe.batch_widths()
        accumulation = self._accumulation(widths)
        with tempfile.TemporaryDirectory() as folder, _compile_cache(Path(folder)), fit.out_of_memory():
            cold, _ = _seconds(lambda: memory.measure(Program(cfg, self.recipe), widths, accumulation))
            jax.clear_caches()
            program = Program(cfg, self.recipe)
            cached, needs = _seconds(lambda: memory.measure(program, widths, accumulation))
            call: Any = needs.programs["step"][0] if "step" in needs.programs else program.step
            batch = self._batch(program, widths, accumulation)
            samples = timing.steps(program, call, batch, repeats=self.repeats)
        seconds = Spread.of(samples)
        work = flops(cfg)
        reached = work / (seconds.median * self.ceilings.matmul * self.placement.devices)
        peak = timing.peak_bytes()
        return [
            Row(
                "step",
                cfg.recipe,
                f"{cfg.train.global_batch} samples = {needs.micro_batch} a device x {self.placement.data} x "
                f"{accumulation} accumulated, remat {cfg.compute.remat}",
                seconds,
                samples_per_second=cfg.train.global_batch / seconds.median,
                tokens_per_second=cfg.train.global_batch * self._tokens(widths) / seconds.median,
                flops=work,
                of_matmul=reached,
                peak_bytes=needs.peak if peak is None else peak,
                peak_from="compiled" if peak is None else "device",
                compile_seconds=cold,
                cached_seconds=cached,
            )
        ]

    def _accumulation(self, widths: Tree) -> int:
        program, room = Program(self.cfg, self.recipe), fit.room(self.cfg)
        if self.cfg.train.micro_batch or room is None:
            return program.accumulation(self.cfg.train.micro_batch)
        needs = fit.largest_micro_batch(program, widths, room)
        if needs.peak > room.limit:
            raise UserError(fit.refusal(program, needs, room))
        return needs.accumulation

    def _batch(self, program: Program, widths: Tree, accumulation: int) -> Tree:
        """Returns a random batch; every example is sent whole, in all slots."""
        spec = self.cfg.encoder

        def send(path: Any, leaf: jax.Array) -> jax.Array:
            if path_of(path).split("/")[-1] != "channel":
                return leaf
            whole = np.broadcast_to(np.array([spec.slots, spec.width, EXACT], leaf.dtype), leaf.shape)
            return jax.device_put(whole, leaf.sharding)

        drawn = timing.fill(program.batch(widths, accumulation), ids=TOKENS)
        return jax.tree_util.tree_map_with_path(send, drawn)

    def _tokens(self, widths: Tree) -> int:
        """Returns how many tokens of text an example has; latents count as none."""
        unit, each = recipes.count(self.recipe)
        if unit == "tokens":
            return each
        leaves = jax.tree_util.tree_leaves_with_path(widths)
        ids = ("ids", "answer_inputs")
        return sum(
            leaf.size for path, leaf in leaves if path_of(path).split("/")[-1] in ids and "teacher" not in path_of(path)
        )

    # --- a trained wire's work

    def encode(self) -> list[Row]:
        """Writes texts that fill the encoder's window."""
        batch, spec = place.round_up(self.cfg.eval.batch, self.placement.data), self.cfg.encoder
        shapes, placed = self.recipe.abstract().trainable, self.recipe.shardings().trainable
        trainable = timing.fill(place.place_shapes(shapes, placed))
        tokens = spec.window * spec.windows
        source = {
            "ids": np.random.default_rng(0).integers(0, TOKENS, (batch, tokens), dtype=np.int32),
            "mask": np.ones((batch, tokens), bool),
            "channel": np.tile(np.array([spec.slots, spec.width, EXACT], np.int32), (batch, 1)),
        }
        placed = place.put_eval(source, self.placement.learner)
        seconds = Spread.of(timing.repeat(lambda: self.recipe.encode(trainable, placed), repeats=self.repeats))
        # A body that learns passes three times over a step's products, backward twice as dear as forward.
        widths = self.recipe.batch_widths()
        work = self.recipe.terms(widths, batch)[""].flops / 3
        return [
            Row(
                "encode",
                f"{spec.kind} encoder",
                f"{batch} texts of {tokens} tokens -> {spec.slots} x {spec.width}",
                seconds,
                samples_per_second=batch / seconds.median,
                tokens_per_second=batch * tokens / seconds.median,
                flops=work,
                of_matmul=work / (seconds.median * self.ceilings.matmul * self.placement.data),
            )
        ]

    def answer(self) -> list[Row]:
        """Generates with each reader; the time of a step is the difference between a long and a short answer."""
        return [self._generate(name) for name in self.placement.readers]

    def _generate(self, name: str) -> Row:
        at, tokens = self.placement.readers[name], self.cfg.eval.max_new_tokens
        model, batch = self.recipe.wire.readers[name].config, place.round_up(self.cfg.eval.batch, self.placement.data)
        fields = self.recipe.batch_widths()["readers"][name]
        length = sum(fields[key]["ids"].shape[0] for key in ("before", "after")) + self.cfg.encoder.slots + 1
        shapes, placed = self.recipe.abstract().frozen[name], self.recipe.shardings().frozen[name]
        params = timing.fill(place.place_shapes(shapes, placed))
        dtype = params["embed"].dtype
        embedded = np.random.default_rng(0).normal(0, 0.02, (batch, length, model.width)).astype(dtype)
        prompt = wire.Prompt(*place.put_eval((embedded, np.ones((batch, length), bool)), at.mesh))

        def run(count: int) -> list[float]:
            return timing.repeat(lambda: self.recipe.generate(params, prompt, name, count), repeats=self.repeats)

        whole, short = Spread.of(run(tokens)), Spread.of(run(1))
        step = (whole.median - short.median) / max(1, tokens - 1)
        need = _decode_bytes(params, model, batch, length + tokens, dtype)
        share = need / step / self.ceilings.bandwidth if at.mesh.devices.size == 1 and tokens > 1 and step > 0 else None
        return Row(
            "answer",
            name,
            f"{batch} prompts of {length} positions, {tokens} tokens each; a token of all {step * 1e3:.1f} ms",
            whole,
            samples_per_second=batch / whole.median,
            tokens_per_second=batch * tokens / whole.median,
            bytes=need,
            of_bandwidth=share,
        )

    # --- files

    def load(self) -> list[Row]:
        """Loads each reader's weights, once, and reads the same files for their bytes alone."""
        return [self._load(name) for name in self.cfg.llms]

    def _load(self, name: str) -> Row:
        llm, at = self.cfg.llms[name], self.placement.readers[name]
        location = pretrained.locate(self.cfg, llm.source, llm.sha256)
        shapes = pretrained.describe(weights.describe(location), self.cfg, llm)
        shardings = pretrained.shardings(shapes, llm, at, name)
        files = [location] if location.is_file() else sorted(location.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        read = min(_seconds(lambda: _read(files))[0] for _ in range(2))  # the first may wait for the disk
        before = _host_bytes(peak=False)
        taken, tree = _seconds(lambda: jax.block_until_ready(pretrained.load(location, self.cfg, llm, shardings)))
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) if jax.default_backend() == "cpu" else 0
        after = _host_bytes(peak=True)
        return Row(
            "load",
            name,
            f"{size / 1e9:.2f} GB of files as {llm.weights}, {size / taken / 1e9:.2f} GB/s; read alone "
            f"{size / read / 1e9:.2f} GB/s",
            Spread.of([taken]),
            bytes=size,
            peak_bytes=None if before is None or after is None else max(0, after - before - held),
            peak_from="host",
        )

    def input(self) -> list[Row]:
        """Makes batches as training does and puts them on the devices, with no step between them."""
        cfg, recipe = self.cfg, recipes.make(self.cfg, self.placement)
        loader = Loader(recipe.course(), global_batch=cfg.train.global_batch, seed=cfg.seed)
        padding, samples = [], []
        for _ in range(BATCHES):
            started = time.perf_counter()
            batch = next(loader)
            jax.block_until_ready(place.put_parts(batch, self.placement, place.put_eval))
            samples.append(time.perf_counter() - started)
            padding.append(padded(batch))
        seconds = Spread.of(samples[BATCHES // 4 :])  # those made ahead are gone by then
        return [
            Row(
                "input",
                cfg.recipe,
                f"batches of {cfg.train.global_batch} from {cfg.data.train}, made while nothing computes",
                seconds,
                samples_per_second=cfg.train.global_batch / seconds.median,
                padding=float(np.mean(padding)),
            )
        ]


def flops(cfg: Config) -> float:
    """Returns the model's arithmetic in one step of all devices, nothing counted twice."""
    once = dataclasses.replace(
        choice.with_remat(cfg, "none"),
        ttt=dataclasses.replace(cfg.ttt, loss_chunk=0),  # a head in chunks is applied once more
        dpo=dataclasses.replace(cfg.dpo, chunk=0),
    )
    recipe = recipes.outline(once)
    terms = recipe.terms(recipe.batch_widths(), cfg.train.global_batch)
    return sum(term.flops for term in terms.values())


def padded(batch: Tree) -> float:
    """Returns the share of a batch's positions that hold no token; 0 where nothing is ever padded."""
    real = total = 0

    def count(fields: Any) -> None:
        nonlocal real, total
        if not isinstance(fields, dict):
            return
        masks = [fields["mask"]] if "mask" in fields else []
        masks += [np.asarray(fields["weights"]) > 0] if "targets" in fields else []
        real, total = real + sum(int(mask.sum()) for mask in masks), total + sum(mask.size for mask in masks)
        for one in fields.values():
            count(one)

    count(batch)
    return 1 - real / total if total else 0.0


def _arithmetic(cfg: Config) -> str:
    """Returns JAX's name of the type in which most products are: the narrowest that a reader computes in."""
    words = [llm.weights for llm in cfg.llms.values()] or [cfg.compute.dtype]
    return min((reader_dtype(word, cfg.compute.dtype) for word in words), key=lambda name: jnp.dtype(name).itemsize)


def _decode_bytes(params: Tree, model: decoder.DecoderConfig, batch: int, slots: int, dtype: Any) -> float:
    """Returns the bytes that the next token of every row needs: all weights but a lookup's table, and the cache."""
    looked_up = 0 if model.tied else params["embed"].nbytes
    cache = 2 * model.layers * batch * slots * model.kv_heads * model.head_dim * jnp.dtype(dtype).itemsize
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - looked_up + cache


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = call()
    return time.perf_counter() - started, value


def _read(files: Sequence[Path]) -> None:
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(BLOCK):
                pass


def _host_bytes(*, peak: bool) -> int | None:
    """Returns the host memory that this process holds, or the most since it was last asked for that; None off Linux."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    found = dict(line.split(":", 1) for line in status.read_text("utf-8").splitlines())
    if not peak:
        reset.write_text("5", "utf-8")  # sets the high-water mark back
    return 1024 * int(found["VmHWM" if peak else "VmRSS"].split()[0])


@contextlib.contextmanager
def _compile_cache(folder: Path) -> Iterator[None]:
    """Keeps compiled programs in another folder meanwhile."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # or the one that is open already would go on
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def table(device: str, ceilings: Ceilings, rows: Sequence[Row]) -> str:
    """Returns the rows for people."""
    lines = [
        f"{device}; measured ceilings in {ceilings.dtype}: {ceilings.matmul / 1e12:.2f} TFLOP/s, "
        f"{ceilings.bandwidth / 1e9:.1f} GB/s",
        "",
    ]
    head = ("part", "of", "seconds", "least..most", "samples/s", "tokens/s", "of ceiling", "memory GB", "")
    cells = [head, *map(_cells, rows)]
    sizes = [max(len(row[column]) for row in cells) for column in range(len(head) - 1)]
    for row in cells:
        left = [cell.ljust(size) for cell, size in zip(row[:2], sizes[:2], strict=True)]
        right = [cell.rjust(size) for cell, size in zip(row[2:-1], sizes[2:], strict=True)]
        lines.append("  ".join([*left, *right, row[-1]]).rstrip())
    for row in rows:
        if row.compile_seconds is not None and row.cached_seconds is not None:
            told = f"{row.compile_seconds:.1f} s with an empty cache, {row.cached_seconds:.1f} s with a filled one"
            lines.append(f"{row.part}, traced and compiled: {told}")
        if row.padding is not None:
            lines.append(f"{row.part}, positions that hold no token: {row.padding:.1%}")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    if row.seconds is None:
        return (row.part, row.subject, "not measured", *"-----", row.why_not)
    spread = f"{row.seconds.least:.4f}..{row.seconds.most:.4f}"
    share = next(
        (
            f"{value:.0%} {name}"
            for value, name in ((row.of_matmul, "matmul"), (row.of_bandwidth, "memory"))
            if value is not None
        ),
        "-",
    )
    peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.3f} {row.peak_from}"
    return (
        row.part,
        row.subject,
        f"{row.seconds.median:.4f}",
        spread,
        number(row.samples_per_second, ",.1f"),
        number(row.tokens_per_second, ",.0f"),
        share,
        peak,
        row.what,
    )
