"""Estimate of a train step from its traced passes: orders what is compiled, and stands in without a compiler.

Weights, trainables and moments are exact (from shapes and shardings). FLOPs, activations and memory traffic are read
from the jaxpr of one device's passes (`training.traced_costs`), bytes sent are those of the ring algorithm.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lw_jax.core import precision, tree
from lw_jax.core.types import Tree
from lw_jax.planning.gpus import Target
from lw_jax.planning.roofline import COLLECTIVE_SECONDS, LINK_FRACTION, NO_TIME, Speed, Times
from lw_jax.training import memory, step_costs
from lw_jax.training.memory import StepMemory
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.traced_costs import Costs
from sharding import place

# How far compiled plans' samples/s lay from the estimate's, least and most: docs/planning.md, and preference tuning and
# TTT in docs/numbers.md (tests/unit/planning/test_estimate.py holds it against them).
COMPILED = (-0.15, 0.03)
ERROR = (
    f"arithmetic; compiled plans of large models were between {COMPILED[0]:+.0%} and {COMPILED[1]:+.0%} of its "
    "samples/s, those of tiny ones far below: it has no time to start a kernel"
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory, FLOPs, bytes sent and time of one step on the busiest device, by arithmetic."""

    needs: StepMemory
    flops: float
    collective_bytes: float
    times: Times | None


def estimate(program: StepSpec, widths: Tree, micro_batch: int, target: Target | None) -> Estimate:
    """Estimates one program at a micro-batch (0: a device's whole share)."""
    accumulation = program.accumulation(micro_batch)
    cut, placement, trainable = program.cut(accumulation), program.placement, program.state["trainable"]
    costs = step_costs.of(program, widths, cut.micro_batch)
    residuals = step_costs.kept_bytes(program, widths, cut.micro_batch)
    sent = {name: accumulation * _sent(program, name, costs[name]) for name in placement.readers}
    sent[""] = _summed(program, trainable, accumulation)
    working, flops, wire = {}, [], []
    for mesh in placement.meshes:
        here = [name for name, component in placement.readers.items() if component.mesh == mesh]
        # The readers run one after the other.
        most = max((costs[name].peak + _gathered(program, name) for name in here), default=0)
        if mesh == placement.learner:
            most = max(costs[""].peak, residuals + most)
            most += place.device_bytes(trainable) if accumulation > 1 else 0  # the gradients' sum
            here = ["", *here]
        working[mesh] = most
        flops.append(accumulation * sum(costs[name].flops for name in here))
        flops[-1] += step_costs.update(program).flops if mesh == placement.learner else 0.0
        wire.append(sum(sent[name] for name in here))
    needs = memory.of_step(cut, memory.resident(program), working, {})
    times = _times(program, costs, sent, accumulation, target) if target else None
    return Estimate(needs, max(flops), max(wire), times)


def forward_share(program: StepSpec, micro_batch: int, validated: int, target: Target) -> float:
    """Returns the time of a held-out example, one forward pass of `validated` at once, over that of a training one."""
    speed, recipe = Speed.of(target.card), program.recipe
    trained = step_costs.of(program, recipe.batch_widths(), micro_batch)
    forward = step_costs.of(program, recipe.validation_widths(), validated, backward=False)
    seconds = [sum(speed.predict(part).total for part in costs.values()) for costs in (trained, forward)]
    return seconds[1] / validated / (seconds[0] / micro_batch)


def _times(
    program: StepSpec, costs: dict[str, Costs], sent: dict[str, float], accumulation: int, target: Target
) -> Times:
    """Returns the seconds of a step: a sum, except that of readers on separate meshes the slowest counts."""
    speed, parts, model = Speed.of(target.card), {}, program.placement.learner.shape["model"]
    for name, cost in costs.items():
        # Devices of the model axis are neighbours; gradients and weights over data go from one such group to the next.
        over_model = name and program.placement.readers[name].table == "tensor"
        group = range(model) if over_model else range(0, target.devices, model)
        link = target.link_bandwidth(list(group)) * LINK_FRACTION
        parts[name] = dataclasses.replace(speed.predict(cost) * accumulation, collective=sent[name] / link)
    share = place.device_bytes(program.state["trainable"]) / max(1, tree.nbytes(program.recipe.abstract.trainable))
    summing = COLLECTIVE_SECONDS if any(sent.values()) else 0.0
    update = dataclasses.replace(speed.predict(step_costs.update(program)) * share, collective=summing)
    readers = [parts[name] for name in program.placement.readers]
    if program.placement.on_several_meshes:
        readers = [max(readers, key=lambda reader: reader.total)]
    return sum([parts[""], update, *readers], NO_TIME)


def _sent(program: StepSpec, name: str, costs: Costs) -> float:
    """Returns the bytes that a device sends in a micro-batch for a reader whose weights several share, by the ring.

    Over a model axis each layer sums its two products' results forward, and two gradients backward; over data each
    layer's weights are gathered for either pass.
    """
    component, layers = program.placement.readers[name], program.frozen[name].get("layers")
    if component.table == "tensor" and layers:
        count, parts = jax.tree.leaves(layers)[0].shape[0], component.mesh.shape["model"]
        again = program.cfg.compute.remat == "full"  # attention's sum of a recomputed pass
        loops = [loop for loop in costs.loops if loop.length == count]
        sums = sum((2 + again * loop.reverse) * loop.length * loop.bytes * loop.times for loop in loops)
        return 2 * (parts - 1) / parts * sums
    if component.table == "fsdp":
        parts = component.mesh.shape["data"]
        return 2 * (parts - 1) / parts * tree.nbytes(program.frozen[name])
    return 0.0


def _gathered(program: StepSpec, name: str) -> int:
    """Returns the bytes of a reader's weights that a device gathers at once: a layer's, and the largest beside them."""
    if program.placement.readers[name].table != "fsdp":
        return 0
    weights = dict(program.frozen[name])
    layers = jax.tree.leaves(weights.pop("layers", {}))
    layer = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in layers)
    return layer + max(map(tree.nbytes, jax.tree.leaves(weights)), default=0)


def _summed(program: StepSpec, trainable: Tree, accumulation: int) -> float:
    """Returns the bytes that a device sends for gradients, by the ring algorithm.

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
