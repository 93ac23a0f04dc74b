"""Predicted benchmark rows (`bench --target`), from programs compiled for GPUs elsewhere. Nothing is measured.

Seconds are the roofline's over every kernel (`roofline.py`), memory is the compiler's own figure. Shares are of the
data sheet's peaks, so a step of nothing but products would show `roofline.MATMUL_FRACTION`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from lw_jax import recipes
from lw_jax.benchmarking.measurement import FREE
from lw_jax.benchmarking.rows import Benchmark, Call, Row
from lw_jax.benchmarking.timing import Ceilings
from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.planning import generation_memory, gpus, hlo_counts, planner, roofline, workload
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import memory_limit
from sharding import placement as placements


class Predicted(Benchmark):
    """One configuration on a target's devices."""

    def __init__(self, cfg: Config, target: str):
        """Plans the step, which decides where everything lies.

        Raises:
            UserError: the target is not known, nothing can be compiled for it, or nothing fits on it.
        """
        self.target = gpus.parse(target)
        devices = gpus.compile_devices(self.target)
        self.plan = planner.make(cfg, target)
        if self.plan.chosen is None:
            raise UserError(f"--target {target}: {self.plan.why}")
        self.best = best = self.plan.chosen
        sizes = recipes.reader_bytes(cfg)
        placed = placements.place(best.strategy, sizes, data=best.data, model=best.model, devices=devices)
        room = memory_limit.of_devices(cfg, self.target.card.memory_bytes)
        super().__init__(generation_memory.resolve_layers(config.with_remat(cfg, best.remat), placed, room), placed)
        self.device = f"{self.target.devices} x {self.target.card.model}, absent: NOTHING IS MEASURED"
        self.parts = list(FREE if isinstance(self.recipe, LatentWire) else FREE[:1])

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        dtype, card = workload.arithmetic(self.cfg, self.placement.platform), self.target.card
        return Ceilings(dtype, card.peak[roofline.ARITHMETIC[dtype]], card.bandwidth)

    def step(self) -> list[Row]:
        best, seconds = self.best, self.best.step_seconds
        if seconds is None:
            raise UserError(f"--target {self.plan.target}: {self.plan.untimed}")
        unit, each = self.recipe.unit
        tokens = self.cfg.train.global_batch * each / seconds if unit == "tokens" else None
        row = self.step_row(
            seconds,
            best.micro_batch,
            best.accumulation,
            f", placement {best.name}",
            predicted_seconds=seconds,
            tokens_per_second=tokens,
            peak_bytes=best.peak_bytes,
            peak_from="compiled",
            compiled_flops=best.flops,
            compiled_bytes=best.moved_bytes,
        )
        return [row]

    def costs(self, weights: Tree, calls: Sequence[Call]) -> list[dict[str, Any]]:
        return [self._compile(jax.jit(call).lower(weights, inputs)) for call, inputs in calls]

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
