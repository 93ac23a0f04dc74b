"""Arithmetic of a recipe's step: the cross-check of the compiled plan, and its stand-in where nothing can compile.

Weights, trainables and moments are exact (from shapes and shardings). Activations, FLOPs and times are sums of named
terms over the step's matrix products; what a compiler fuses, keeps or adds is not in them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lw_jax import optim
from lw_jax.core.types import DTYPES, Tree, reader_dtype
from lw_jax.memory import Needs
from lw_jax.program import Program
from lw_jax.recipes.base import Plannable
from lw_jax.recipes.terms import Terms
from lw_jax.roofline import BANDWIDTH_FRACTION, COLLECTIVE_SECONDS, LINK_FRACTION, MATMUL_FRACTION, Times
from lw_jax.targets import Target
from sharding import place


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one step takes, by arithmetic, on the device with most to do."""

    needs: Needs
    flops: float
    collective_bytes: float
    times: Times | None


def estimate(program: Program, recipe: Plannable, widths: Tree, micro_batch: int, target: Target | None) -> Estimate:
    """Returns the arithmetic of one placement, recomputation and micro-batch (0: the whole share)."""
    accumulation = program.accumulation(micro_batch)
    rows = program.share // accumulation
    learner, terms = program.placement.learner, recipe.terms(widths, rows)
    state, frozen = program.state(), program.frozen()
    peaks, flops, wire, seconds = [], [], [], []
    for mesh in program.placement.meshes:
        held = place.device_bytes((state["trainable"], state["opt_state"])) if mesh == learner else 0
        shared = terms[""] if mesh == learner else Terms()
        working, work, sent, logits, moved = shared.bytes, shared.flops, 0.0, 0.0, shared.traffic
        for name, at in program.placement.readers.items():
            if at.mesh != mesh:
                continue
            held += place.device_bytes(frozen[name])
            one = terms[name]
            # What is shared lives on while the readers run, these one after the other.
            working, work, sent = max(working, shared.bytes + one.bytes), work + one.flops, sent + one.wire
            logits, moved = max(logits, one.logits), moved + one.traffic
        work, sent, moved = work * accumulation, sent * accumulation, moved * accumulation
        if mesh == learner:
            work += optim.flops(program.cfg.optim, recipe.rates, recipe.abstract().trainable)
            sent += _summed(program, state["trainable"], accumulation)
            working += place.device_bytes(state["trainable"]) * (2 if accumulation > 1 else 1)  # gradients
        peaks.append((held, int(working), int(logits)))
        flops.append(work)
        wire.append(sent)
        # Weights are read once a pass, at least.
        read = 3 * accumulation * held + moved
        seconds.append(_seconds(work, sent, read, target, _dtype(program)) if target else None)
    fullest = max(range(len(peaks)), key=lambda i: sum(peaks[i][:2]))
    mesh = program.placement.meshes[fullest]
    weights = sum(place.device_bytes(frozen[name]) for name, at in program.placement.readers.items() if at.mesh == mesh)
    needs = Needs(
        micro_batch=rows,
        accumulation=accumulation,
        weights=weights,
        trainable=place.device_bytes(state["trainable"]) if mesh == learner else 0,
        optimizer=place.device_bytes(state["opt_state"]) if mesh == learner else 0,
        batch=0,
        activations=peaks[fullest][1],
        logits=peaks[fullest][2],
        by_mesh=tuple(held + working for held, working, _ in peaks),
    )
    slowest = max((one for one in seconds if one), key=lambda one: one.total, default=None)
    return Estimate(needs, max(flops), max(wire), slowest)


def _summed(program: Program, trainable: Tree, accumulation: int) -> float:
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
    size = jnp.dtype(DTYPES[program.cfg.compute.dtype]).itemsize
    moved = 3 * size * sum(leaf.size for leaf in parts)
    return accumulation * (n - 1) / n * (moved + 2 * whole)


def _dtype(program: Program) -> str:
    cfg = program.cfg
    words = {reader_dtype(llm.weights, cfg.compute.dtype) for llm in cfg.llms.values()} or {DTYPES[cfg.compute.dtype]}
    return "bf16" if "bfloat16" in words else "tf32"


def _seconds(work: float, sent: float, read: float, target: Target, dtype: str) -> Times:
    card = target.card
    peak = card.peak.get(dtype, card.peak["fp32"])
    link = target.link_bandwidth(list(range(target.devices)))
    return Times(
        gemm=work / (peak * MATMUL_FRACTION),
        memory=read / (card.bandwidth * BANDWIDTH_FRACTION),
        collective=sent / (link * LINK_FRACTION) + (COLLECTIVE_SECONDS if sent else 0.0),
    )
