"""Analytic estimate of a train step: cross-check of the compiled plan, and its substitute without a compiler.

Weights, trainables and moments are exact (from shapes and shardings). Activations, FLOPs and bytes sent are sums of
named terms over the step's matrix products; seconds count the memory traffic beside them too, as compiled programs had
it (`recipes.traffic`).
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lw_jax.core import precision
from lw_jax.core.types import Tree
from lw_jax.models.memory_traffic import ACCUMULATED, OPTIMIZER
from lw_jax.models.pass_costs import Terms
from lw_jax.planning import workload
from lw_jax.planning.gpus import Target
from lw_jax.planning.roofline import BANDWIDTH_FRACTION, COLLECTIVE_SECONDS, LINK_FRACTION, MATMUL_FRACTION, Times
from lw_jax.training import optimizers
from lw_jax.training.memory import StepMemory
from lw_jax.training.recipe import Recipe
from lw_jax.training.step_spec import StepSpec
from sharding import place

# How far compiled plans' samples/s lay from the estimate's, least and most: docs/planning.md, and preference tuning and
# TTT in docs/numbers.md (tests/unit/test_estimate.py holds it against them).
COMPILED = (-0.12, 0.10)
ERROR = f"arithmetic; compiled plans were between {COMPILED[0]:+.0%} and {COMPILED[1]:+.0%} of its samples/s"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory, FLOPs, bytes sent and time of one step on the busiest device, by arithmetic."""

    needs: StepMemory
    flops: float
    collective_bytes: float
    times: Times | None


def estimate(program: StepSpec, recipe: Recipe, widths: Tree, micro_batch: int, target: Target | None) -> Estimate:
    """Estimates one program at a micro-batch (0: a device's whole share)."""
    accumulation = program.accumulation(micro_batch)
    rows = program.cut(accumulation).micro_batch
    learner, terms = program.placement.learner, recipe.terms(widths, rows)
    state, weights = program.state(), program.frozen_bytes()
    peaks, flops, wire = [], [], []
    for mesh in program.placement.meshes:
        held = weights[mesh] + (place.device_bytes((state["trainable"], state["opt_state"])) if mesh == learner else 0)
        shared = terms[""] if mesh == learner else Terms()
        working, work, sent, logits = shared.bytes, shared.flops, 0.0, 0.0
        for name, at in program.placement.readers.items():
            if at.mesh != mesh:
                continue
            one = terms[name]
            # What is shared lives on while the readers run, these one after the other.
            working, work, sent = max(working, shared.bytes + one.bytes), work + one.flops, sent + one.wire
            logits = max(logits, one.logits)
        work, sent = work * accumulation, sent * accumulation
        if mesh == learner:
            work += optimizers.flops(program.cfg.optim, recipe.rates, recipe.abstract().trainable)
            sent += _summed(program, state["trainable"], accumulation)
            working += place.device_bytes(state["trainable"]) * (2 if accumulation > 1 else 1)  # gradients
        peaks.append((held, int(working), int(logits)))
        flops.append(work)
        wire.append(sent)
    fullest = max(range(len(peaks)), key=lambda i: sum(peaks[i][:2]))
    mesh = program.placement.meshes[fullest]
    needs = StepMemory(
        micro_batch=rows,
        accumulation=accumulation,
        weights=weights[mesh],
        trainable=place.device_bytes(state["trainable"]) if mesh == learner else 0,
        optimizer=place.device_bytes(state["opt_state"]) if mesh == learner else 0,
        batch=0,
        activations=peaks[fullest][1],
        logits=peaks[fullest][2],
        by_mesh=tuple(held + working for held, working, _ in peaks),
    )
    times = _times(program, recipe, terms, accumulation, target) if target else None
    return Estimate(needs, max(flops), max(wire), times)


def _times(program: StepSpec, recipe: Recipe, terms: Mapping[str, Terms], accumulation: int, target: Target) -> Times:
    """Returns the seconds of a step: a sum, except that of readers on separate meshes the slowest counts."""
    card, dtype, trainable = target.card, _dtype(program), program.state()["trainable"]
    peak = card.peak.get(dtype, card.peak["fp32"]) * MATMUL_FRACTION
    bandwidth = card.bandwidth * BANDWIDTH_FRACTION
    link = target.link_bandwidth(list(range(target.devices))) * LINK_FRACTION

    def part(one: Terms) -> Times:
        return Times(
            gemm=accumulation * max(one.flops / peak, one.read / bandwidth),
            memory=accumulation * one.traffic / bandwidth,
            collective=accumulation * one.wire / link,
        )

    learned, summed = place.device_bytes(trainable), _summed(program, trainable, accumulation)
    stepped = learned * (OPTIMIZER + (ACCUMULATED * accumulation if accumulation > 1 else 0.0))
    update = Times(
        gemm=optimizers.flops(program.cfg.optim, recipe.rates, recipe.abstract().trainable) / peak,
        memory=stepped / bandwidth,
        collective=summed / link,
    )
    readers = [part(terms[name]) for name in program.placement.readers]
    if program.placement.on_several_meshes:
        readers = [max(readers, key=lambda one: one.total)]
    in_turn = [part(terms[""]), update, *readers]
    found = Times(*(sum(getattr(one, key) for one in in_turn) for key in ("gemm", "memory", "collective")))
    sends = summed or any(one.wire for one in terms.values())
    return dataclasses.replace(found, collective=found.collective + (COLLECTIVE_SECONDS if sends else 0.0))


def _summed(program: StepSpec, trainable: Tree, accumulation: int) -> float:
    """Returns the bytes that a device sends for gradients, by the ring algorithm (see `steps`).

    Whole weights: their gradients are summed once a step. Weights over data: with every micro-batch they are gathered
    for the forward and the backward pass and their gradients scattered, all in the precision of the arithmetic; what is
    whole beside them is summed as often.
    """
    leaves, n = jax.tree.leaves(trainable), program.placement.data
    whole = place.device_bytes([leaf for leaf in leaves if leaf.sharding.is_fully_replicated])
    parts = [leaf for leaf in leaves if not leaf.sharding.is_fully_replicated]
    if not parts:
        return 2 * (n - 1) / n * whole
    size = jnp.dtype(precision.of(program.cfg.compute.dtype, program.placement.platform).factors).itemsize
    moved = 3 * size * sum(leaf.size for leaf in parts)
    return accumulation * (n - 1) / n * (moved + 2 * whole)


def _dtype(program: StepSpec) -> str:
    return "bf16" if workload.arithmetic(program.cfg, program.placement.platform) == "bfloat16" else "tf32"
