"""Predicted benchmark rows (`bench --target`), from programs compiled for GPUs elsewhere. Nothing is measured.

Seconds are the roofline's over every kernel (`roofline.py`), memory is the compiler's own figure. Shares are of the
data sheet's peaks, so a step of nothing but products would show `roofline.MATMUL_FRACTION`.
"""

from typing import Any

import jax

from lw_jax import recipes
from lw_jax.benchmarking.measurement import FREE
from lw_jax.benchmarking.rows import Row, answer_row, encode_row, prefill_rows
from lw_jax.benchmarking.timing import Ceilings
from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.models.wire import Prompt
from lw_jax.planning import generation_memory, gpus, hlo_counts, planner, roofline, workload
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import memory_limit
from sharding import placement as placements


class Predicted:
    """One configuration on a target's devices."""

    def __init__(self, cfg: Config, target: str):
        """Plans the step, which decides where everything lies.

        Raises:
            UserError: the target is not known, nothing can be compiled for it, or nothing fits on it.
        """
        self.target = gpus.parse(target)
        try:
            devices = gpus.compile_devices(self.target)
        except gpus.CompilerAbsent as error:
            raise UserError(str(error)) from error
        self.plan = planner.make(cfg, target)
        if self.plan.chosen is None:
            raise UserError(f"--target {target}: {self.plan.why}")
        self.best = best = self.plan.chosen
        sizes = recipes.reader_bytes(cfg)
        self.placement = placements.place(best.strategy, sizes, data=best.data, model=best.model, devices=devices)
        card = self.target.card
        room = memory_limit.of_devices(cfg, card.memory_bytes)
        self.cfg = generation_memory.resolve_layers(config.with_remat(cfg, best.remat), self.placement, room)
        self.recipe: Any = recipes.make(self.cfg, self.placement, outline=True)
        dtype = workload.arithmetic(cfg, self.placement.platform)
        self.ceilings = Ceilings(dtype, card.peak[roofline.ARITHMETIC[dtype]], card.bandwidth)

    @property
    def device(self) -> str:
        return f"{self.target.devices} x {self.target.card.model}, absent: NOTHING IS MEASURED"

    @property
    def parts(self) -> list[str]:
        return list(FREE if isinstance(self.recipe, LatentWire) else FREE[:1])

    def measure(self, part: str, *, asked: bool = True) -> list[Row]:
        """Returns a part's rows. Raises UserError for one that the recipe does not have, or that needs the machine."""
        del asked  # none of them reads a file
        if part not in self.parts:
            rule = f"of an absent card recipe {self.cfg.recipe!r} has {', '.join(self.parts)}"
            raise UserError(f"--parts {part}: {rule}; name some of these, or leave out --target.")
        return getattr(self, part)()

    def step(self) -> list[Row]:
        best, work = self.best, workload.step_flops(self.cfg)
        seconds, batch = best.step_seconds, self.cfg.train.global_batch
        if seconds is None:
            raise UserError(f"--target {self.plan.target}: {self.plan.untimed}")
        unit, each = self.recipe.unit
        return [
            Row(
                "step",
                self.cfg.recipe,
                f"{batch} samples = {best.micro_batch} a device x {self.placement.data} x {best.accumulation} "
                f"accumulated, remat {best.remat}, placement {best.name}",
                predicted_seconds=seconds,
                samples_per_second=batch / seconds,
                tokens_per_second=batch * each / seconds if unit == "tokens" else None,
                flops=work,
                of_matmul=work / (seconds * self.ceilings.matmul * best.devices_used),
                peak_bytes=best.peak_bytes,
                peak_from="compiled",
                compiled_flops=best.flops,
                compiled_bytes=best.moved_bytes,
            )
        ]

    def encode(self) -> list[Row]:
        trainable, body = workload.encoder(self.recipe)
        costs = self._compile(jax.jit(self.recipe.wire.encode).lower(trainable, workload.texts(self.recipe), body))
        return [encode_row(self.recipe, self.ceilings, costs["predicted_seconds"], **costs)]

    def prefill(self) -> list[Row]:
        return [row for name in self.placement.readers for row in self._prefill(name)]

    def _prefill(self, name: str) -> list[Row]:
        shapes, params = workload.single_prompts(self.recipe, name), workload.reader(self.recipe, name)
        begin = WireFunctions(self.recipe.wire, self.placement).begin
        lower = jax.jit(lambda params, prompt: begin(params, Prompt(*prompt), name, 1)).lower
        fields = {kind: self._compile(lower(params, prompt)) for kind, prompt in shapes.items()}
        return prefill_rows(name, shapes, fields)

    def answer(self) -> list[Row]:
        """Compiles each reader's answers; the time of a token is the difference between a long and a short answer."""
        return [self._generate(name) for name in self.placement.readers]

    def _generate(self, name: str) -> Row:
        prompts, params = workload.prompts(self.recipe, name), workload.reader(self.recipe, name)

        def generate(params: Tree, prompts: Tree, count: int) -> jax.Array:
            return self.recipe.wire.generate(params, name, Prompt(*prompts), max_new_tokens=count)

        lower = jax.jit(generate, static_argnums=2).lower
        counts = self.cfg.eval.max_new_tokens, 1
        whole, short = (self._compile(lower(params, prompts, count)) for count in counts)
        both = whole["predicted_seconds"], short["predicted_seconds"]
        return answer_row(self.recipe, name, self.ceilings, both, **whole)

    def _compile(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        compiled: Any = gpus.compile_lowered(lowered)
        counts, needs = hlo_counts.analyse(compiled.as_text()), compiled.memory_analysis()
        peak = needs.argument_size_in_bytes + needs.temp_size_in_bytes + needs.output_size_in_bytes
        return {
            "predicted_seconds": roofline.predict(counts, self.target).total,
            "peak_bytes": peak,
            "peak_from": "compiled",
            "compiled_flops": counts.flops,
            "compiled_bytes": counts.moved_bytes,
        }
