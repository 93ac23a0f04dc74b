"""Measured seconds of a configuration's parts, as shares of this machine's measured matmul and memory ceilings.

Weights and tokens are random and a step's batch is at the configuration's limits, so that nothing is fetched and no
word is padded; `input` and `load` read the configuration's own data and weights.
"""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lw_jax import recipes
from lw_jax.benchmarking import timing
from lw_jax.benchmarking.rows import Benchmark, Call, Planned, Row
from lw_jax.benchmarking.timing import Ceilings, Spread
from lw_jax.core import runtime, tree
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import EXACT, Tree
from lw_jax.data import row_sources
from lw_jax.data.loader import Loader
from lw_jax.hub import weights
from lw_jax.hub.tensor_files import list_tensors
from lw_jax.planning import gpus, hardware, hlo_counts, roofline, workload
from lw_jax.planning.gpus import Target
from lw_jax.recipes import frozen_models
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import memory, memory_limit, micro_batch_search, out_of_memory
from lw_jax.training.step_spec import StepSpec
from sharding import place
from sharding.placement import Placement
from sharding.rules import path_of

PARTS = {
    "load": "reads the frozen weights of the configuration into their shards",
    "step": "compiles and takes the training step",
    "encode": "writes texts as latents",
    "prefill": "reads one text, and one message in its place, up to the first token of the answer",
    "answer": "lets each reader answer, token by token with its cache",
    "input": "makes training batches while nothing computes",
}
FREE = ("step", "encode", "prefill", "answer")  # parts that read no file
TOKENS = 256  # different ids of a random batch: every vocabulary has them, and equal ones would meet in one row
BATCHES = 32  # of `input`
BLOCK = 1 << 24  # bytes read at once where nothing but the disk is timed


class Measured(Benchmark):
    """One configuration on this machine's devices."""

    def __init__(self, cfg: Config, placement: Placement, repeats: int):
        super().__init__(cfg, placement)
        wire = isinstance(self.recipe, LatentWire)
        # In the order in which they disturb each other least.
        self.parts = [part for part in PARTS if (part != "load" or cfg.llms) and (wire or part not in FREE[1:])]
        self.device, self.repeats = runtime.describe(), repeats
        self.needs: memory.StepMemory | None = None  # of the step as it was compiled here, once it was measured

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        return timing.ceilings(workload.arithmetic(self.cfg, self.placement.platform))

    def measure(self, part: str, *, asked: bool = True) -> list[Row]:
        if part in FREE or asked:
            return super().measure(part)
        try:
            if missing := self._missing(part):
                raise UserError(f"{missing} is not known to be on this machine; --parts {part} gets it")
            return super().measure(part)
        except UserError as error:
            return [Row(part, self.cfg.recipe, "", why_not=str(error))]

    def _missing(self, part: str) -> str:
        """Returns a source of the part that may have to be fetched, as any data set of the hub may; "" for none."""
        spec, data = self.cfg, self.cfg.data
        models, texts = [llm.source for llm in spec.llms.values()], []
        if part == "input":
            models.append(spec.encoder.source if spec.llms else spec.ttt.tokenizer)
            named = (data.train, data.validation, data.passages)
            texts = [source for text in named for source in row_sources.split_sources(text)]
        absent = [source for source in models if source not in ("", "bytes") and not frozen_models.cached(spec, source)]
        return next(iter([*absent, *(source for source in texts if source.startswith(row_sources.HUB))]), "")

    def step(self) -> list[Row]:
        """Compiles the step twice, from an empty cache and from a filled one, and takes it."""
        cfg, widths = self.cfg, self.recipe.batch_widths()
        accumulation = self._accumulation(widths)
        with tempfile.TemporaryDirectory() as folder, gpus.compile_cache(folder), out_of_memory.detect():
            cold, self.needs = _seconds(lambda: memory.measure(StepSpec(cfg, self.recipe), widths, accumulation))
            jax.clear_caches()
            program = StepSpec(cfg, self.recipe)
            cached, needs = _seconds(lambda: memory.measure(program, widths, accumulation))
            call: Any = needs.programs["step"][0] if "step" in needs.programs else program.step
            batch = self.fill(program.batch(widths, accumulation))
            samples = timing.repeat(timing.stepper(program, call, batch), repeats=self.repeats, warmup=2)
        seconds, peak, planned = Spread.of(samples), timing.peak_bytes(), None  # before the ceilings' own peak
        if (target := hardware.here(cfg).target) and "step" in needs.programs:
            counts = hlo_counts.analyse(needs.programs["step"][0].as_text())
            targets = target, _at_ceilings(target, self.ceilings)
            planned = Planned(needs.peak, *(roofline.predict(counts, each).total for each in targets))
        row = self.step_row(
            seconds.median,
            needs.micro_batch,
            accumulation,
            seconds=seconds,
            tokens_per_second=cfg.train.global_batch * self._tokens(widths) / seconds.median,
            peak_bytes=needs.peak if peak is None else peak,
            peak_from="compiled" if peak is None else "device",
            compile_seconds=cold,
            cached_seconds=cached,
            planned=planned,
        )
        return [row]

    def _accumulation(self, widths: Tree) -> int:
        program, room = StepSpec(self.cfg, self.recipe), memory_limit.local(self.cfg)
        if self.cfg.train.micro_batch or room is None:
            return program.accumulation(self.cfg.train.micro_batch)
        needs = micro_batch_search.largest_micro_batch(program, widths, room)
        if needs.peak > room.usable:
            raise UserError(micro_batch_search.refusal(program, needs, room))
        return needs.accumulation

    def fill(self, shapes: Tree) -> Tree:
        """Returns random tokens for shapes; every example is sent whole, in all slots."""
        spec = self.cfg.encoder

        def send(path: Any, leaf: jax.Array) -> jax.Array:
            if path_of(path).split("/")[-1] != "channel":
                return leaf
            whole = np.broadcast_to(np.array([spec.slots, spec.width, EXACT], leaf.dtype), leaf.shape)
            return jax.device_put(whole, leaf.sharding)

        return jax.tree_util.tree_map_with_path(send, timing.fill(shapes, ids=TOKENS))

    def _tokens(self, widths: Tree) -> int:
        """Returns how many tokens of text an example has; latents count as none."""
        unit, each = self.recipe.unit
        if unit == "tokens":
            return each
        leaves = jax.tree_util.tree_leaves_with_path(widths)
        ids = ("ids", "answer_inputs")
        return sum(
            leaf.size for path, leaf in leaves if path_of(path).split("/")[-1] in ids and "teacher" not in path_of(path)
        )

    def costs(self, weights: Tree, calls: Sequence[Call]) -> list[dict[str, Any]]:
        filled = timing.fill(weights)

        def seconds(call: Callable[[Any, Any], Any], inputs: Tree) -> Spread:
            return Spread.of(timing.repeat(lambda: call(filled, inputs), repeats=self.repeats))

        return [{"seconds": seconds(call, self.fill(shapes))} for call, shapes in calls]

    def load(self) -> list[Row]:
        """Loads each reader's weights, once, and reads the same files for their bytes alone."""
        return [self._load(name) for name in self.cfg.llms]

    def _load(self, name: str) -> Row:
        llm, component = self.cfg.llms[name], self.placement.readers[name]
        location = frozen_models.locate(self.cfg, llm.source, llm.sha256)
        platform = self.placement.platform
        shapes = frozen_models.describe(weights.describe(location), self.cfg, llm, platform)
        shardings = frozen_models.shardings(shapes, llm, component, name)
        files = sorted({stored.file for stored in list_tensors(location).values()})
        size = sum(file.stat().st_size for file in files)
        read = min(_seconds(lambda: _read(files))[0] for _ in range(2))  # the first may wait for the disk
        before = _host_bytes(peak=False)
        seconds, loaded = _seconds(
            lambda: jax.block_until_ready(frozen_models.load(location, self.cfg, llm, shardings, platform))
        )
        resident_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) if jax.default_backend() == "cpu" else 0
        after = _host_bytes(peak=True)
        return Row(
            "load",
            name,
            f"{size / 1e9:.2f} GB of files as {llm.weights}, {size / seconds / 1e9:.2f} GB/s; read alone "
            f"{size / read / 1e9:.2f} GB/s",
            Spread.of([seconds]),
            bytes=size,
            peak_bytes=None if before is None or after is None else max(0, after - before - resident_bytes),
            peak_from="host",
        )

    def input(self) -> list[Row]:
        """Makes batches as training does and puts them on the devices, with no step between them."""
        # Without what frozen models add from their caches: training fills these when it has loaded the models.
        cfg, loss = self.cfg, self.cfg.loss
        if loss.teacher_k:
            loss = dataclasses.replace(loss, kl=0.0, teacher_k=0)
        cfg = dataclasses.replace(cfg, loss=loss, dpo=dataclasses.replace(cfg.dpo, reference="recomputed"))
        recipe = recipes.make(cfg, self.placement)
        loader = Loader(recipe.data_schedule(), global_batch=cfg.train.global_batch, seed=cfg.seed)
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


def _at_ceilings(target: Target, ceilings: Ceilings) -> Target:
    """Returns the target with cards of which the roofline's shares are these ceilings."""
    peak = {roofline.ARITHMETIC[ceilings.dtype]: ceilings.matmul / roofline.MATMUL_FRACTION}
    bandwidth = round(ceilings.bandwidth / roofline.BANDWIDTH_FRACTION)
    card = dataclasses.replace(target.card, peak={**target.card.peak, **peak}, bandwidth=bandwidth)
    return dataclasses.replace(target, card=card)


def padded(batch: Tree) -> float:
    """Returns the share of a batch's positions that hold no token; 0 where nothing is ever padded."""
    fields, masks = tree.flatten_paths(batch), []
    for path, leaf in fields.items():
        above, _, name = path.rpartition("/")
        if name == "mask":
            masks.append(leaf)
        elif name == "segments":  # of packed questions
            masks.append(leaf > 0)
        elif name == "targets":
            masks.append(fields[f"{above}/weights"] > 0)
    total = sum(mask.size for mask in masks)
    return 1 - sum(int(mask.sum()) for mask in masks) / total if total else 0.0


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
    fields = dict(line.split(":", 1) for line in status.read_text("utf-8").splitlines())
    if not peak:
        reset.write_text("5", "utf-8")  # sets the high-water mark back
    return 1024 * int(fields["VmHWM" if peak else "VmRSS"].split()[0])
