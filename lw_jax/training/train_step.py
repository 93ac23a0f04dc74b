"""Train step: one program on one mesh, or several where readers have meshes of their own.

Both forms compute the same sums and the same loss curve. Each device sums the gradients of its own rows over all
micro-batches in fp32; one all-reduce a step sums over devices (`sharding.shards`). Only weights that are sharded over
data themselves (TTT under fsdp) are reduced with every micro-batch: else each device would hold the gradients of the
whole model.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core import rng as rngs
from lw_jax.core.types import SHARED, LossTerms, Tree
from lw_jax.training.recipe import Recipe
from sharding import place
from sharding.placement import Placement
from sharding.shards import Shards

State = dict[str, Tree]  # {"trainable", "opt_state", "step"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One program of a step, its mesh and its number of runs in a step."""

    lowered: Any  # jax.stages.Lowered
    mesh: Mesh
    runs: int = 1


class Fused:
    """One program on one mesh."""

    def __init__(self, recipe: Recipe, mesh: Mesh, optimizer: optax.GradientTransformation, seed: int):
        gradient = _sequential_gradient(recipe) if recipe.has_branches else whole_gradient(recipe)
        shards = Shards(mesh, separate=_is_replicated(recipe))
        shard_gradient = shards.map(gradient, in_axes=(None, None, 0, None))

        def step(state: State, frozen: Tree, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
            rng = rngs.stream(seed, "loss", state["step"])
            sums = _accumulate(shard_gradient, state["trainable"], frozen, shards.split(batch, dim=1), rng)
            return _apply(optimizer, state, *shards.sum(sums))

        self._mesh = mesh
        self._step = jax.jit(step, donate_argnums=0)
        self._loss = jax.jit(recipe.loss)

    def __call__(self, state: State, frozen: Tree, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        """Takes one step over batch [a b ...] of `a` accumulated micro-batches; donates the state."""
        return self._step(state, frozen, batch)

    def evaluate(self, trainable: Tree, frozen: Tree, batch: Tree, key: jax.Array) -> LossTerms:
        return self._loss(trainable, frozen, batch, key)

    def lower(self, state: State, frozen: Tree, batch: Tree) -> dict[str, Part]:
        return {"step": Part(self._step.lower(state, frozen, batch), self._mesh)}

    def lower_evaluation(self, trainable: Tree, frozen: Tree, batch: Tree, key: jax.Array) -> dict[str, Part]:
        return {"validation": Part(self._loss.lower(trainable, frozen, batch, key), self._mesh)}


class Staged:
    """Readers on meshes of their own: the shared activations go to each mesh, their cotangents come back.

    Programs are dispatched without waiting: readers on different devices work at the same time. The optimizer and its
    state stay with the trainable tree; a reader's mesh gets a copy of its part of that tree each step.
    """

    def __init__(
        self, recipe: Recipe, placement: Placement, optimizer: optax.GradientTransformation, seed: int
    ) -> None:
        self.recipe, self.placement = recipe, placement
        self._home = home = Shards(placement.learner, separate=_is_replicated(recipe))
        there = {name: Shards(component.mesh, separate=home.count > 1) for name, component in placement.readers.items()}

        def share(trainable: Tree, source: Tree, step: jax.Array, index: jax.Array, frozen: Tree):
            rng = rngs.stream(seed, "loss", step)

            def forward(source: Tree):
                return jax.vjp(lambda learned: recipe.share(learned, source, rng, frozen), trainable)

            shared, backward = home.map(forward)(home.split(_at(source, index)))
            return home.join(shared), backward

        def branch(name: str, part: Tree, frozen: Tree, fields: Tree, inputs: tuple[Tree, jax.Array, jax.Array]):
            shared, step, index = inputs
            rng, shards = rngs.stream(seed, "loss", step), there[name]

            def gradient(fields: Tree, shared: Tree):
                (grads, cotangent), terms = branch_gradient(recipe, name, frozen, fields, rng)(part, shared)
                return cotangent, (grads, terms)

            cotangent, sums = shards.map(gradient)(shards.split(_at(fields, index)), shards.split(shared))
            return shards.join(cotangent), sums

        def pull(backward: Callable, cotangents: list[Tree]) -> Tree:
            transpose = home.map(lambda backward, cotangent: backward(cotangent)[0])
            return transpose(backward, home.split(functools.reduce(_add, cotangents)))

        def update(state: State, gradients: Tree, branches: dict[str, tuple[Tree, LossTerms]]):
            def combine(gradients: Tree, branches: dict[str, tuple[Tree, LossTerms]]):
                for name, (grads, _) in branches.items():
                    back = jax.vjp(functools.partial(recipe.part, name), state["trainable"])[1]
                    gradients = _add(gradients, back(grads)[0])
                return gradients, functools.reduce(operator.add, (terms for _, terms in branches.values()))

            return _apply(optimizer, state, *home.sum(home.map(combine)(gradients, branches)))

        self._share, self._pull = jax.jit(share), jax.jit(pull)
        self._branch = jax.jit(branch, static_argnums=0)
        self._update = jax.jit(update, donate_argnums=0)
        self._sum = jax.jit(_add, donate_argnums=0)
        self._forward_share = jax.jit(recipe.share)
        self._forward = jax.jit(recipe.branch, static_argnums=0)

    def __call__(self, state: State, frozen: Tree, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        readers, learner = self.placement.readers, self.placement.learner
        parts = {
            name: place.replicate((self.recipe.part(name, state["trainable"]), state["step"]), component.mesh)
            for name, component in readers.items()
        }
        total: dict[str, Tree] = {}
        for index in map(np.int32, range(jax.tree.leaves(batch)[0].shape[0])):
            # No name for the summand, which would keep it alive while the next micro-batch runs.
            total = self._plus(total, self._micro_batch(state, parts, frozen, batch, index))
        gradients, move = total.pop(""), place.rows if self._home.count > 1 else place.replicate
        # Shard i goes from device i to device i: the data axis is as long on every mesh.
        return self._update(state, gradients, {name: move(sums, learner) for name, sums in total.items()})

    def _plus(self, total: dict[str, Tree], summand: dict[str, Tree]) -> dict[str, Tree]:
        return {key: self._sum(total[key], summand[key]) for key in total} or summand

    def _micro_batch(self, state: State, parts: Tree, frozen: Tree, batch: Tree, index: np.int32) -> dict[str, Tree]:
        """Returns the shared part's gradients under "" and each reader's (own gradients, terms) on its mesh.

        Each is a sum per shard, with a leading axis of shards where there are several.
        """
        beside = frozen.get(SHARED)
        shared, backward = self._share(state["trainable"], batch["source"], state["step"], index, beside)
        cotangents, sums = [], {}
        for name, component in self.placement.readers.items():
            part, step = parts[name]
            inputs = (place.rows(shared, component.mesh), step, index)
            cotangent, sums[name] = self._branch(name, part, frozen[name], batch["readers"][name], inputs)
            cotangents.append(cotangent)
        # Only here: a transfer that waits for the first reader would delay the dispatch of the second.
        crossed = [place.rows(cotangent, self.placement.learner) for cotangent in cotangents]
        return {"": self._pull(backward, crossed), **sums}

    def evaluate(self, trainable: Tree, frozen: Tree, batch: Tree, key: jax.Array) -> LossTerms:
        shared = self._forward_share(trainable, batch["source"], key, frozen.get(SHARED))
        outputs = []
        for name, component in self.placement.readers.items():
            part, rng = place.replicate((self.recipe.part(name, trainable), key), component.mesh)
            fields = batch["readers"][name]
            outputs.append(self._forward(name, part, frozen[name], fields, place.rows(shared, component.mesh), rng))
        return functools.reduce(operator.add, [place.replicate(terms, self.placement.learner) for terms in outputs])

    def lower(self, state: State, frozen: Tree, batch: Tree) -> dict[str, Part]:
        learner, count = self.placement.learner, jax.tree.leaves(batch)[0].shape[0]
        index = jax.ShapeDtypeStruct((), np.int32)
        trainable = state["trainable"]
        share = self._share.trace(trainable, batch["source"], state["step"], index, frozen.get(SHARED))
        shared, backward = share.out_info
        spec = self._home.spec
        if self._home.count > 1:
            backward = _shapes(backward, learner, spec)
        programs, cotangents, sums = {"share": Part(share.lower(), learner, count)}, [], {}
        for name, component in self.placement.readers.items():
            part = _shapes(self.recipe.part(name, trainable), component.mesh, P())
            inputs = (_shapes(shared, component.mesh, P("data")), _shapes(state["step"], component.mesh, P()), index)
            branch = self._branch.trace(name, part, frozen[name], batch["readers"][name], inputs)
            programs[name] = Part(branch.lower(), component.mesh, count)
            cotangent, branch_sums = branch.out_info
            cotangents.append(_shapes(cotangent, learner, P("data")))
            sums[name] = _shapes(branch_sums, learner, spec)
        pull = self._pull.trace(backward, cotangents)
        programs["pull"] = Part(pull.lower(), learner, count)
        gradients = _shapes(pull.out_info, learner, spec)
        programs["update"] = Part(self._update.lower(state, gradients, sums), learner)
        return programs

    def lower_evaluation(self, trainable: Tree, frozen: Tree, batch: Tree, key: jax.Array) -> dict[str, Part]:
        share = self._forward_share.trace(trainable, batch["source"], key, frozen.get(SHARED))
        programs = {"share": Part(share.lower(), self.placement.learner)}
        for name, component in self.placement.readers.items():
            part = _shapes(self.recipe.part(name, trainable), component.mesh, P())
            shared, fields = _shapes(share.out_info, component.mesh, P("data")), batch["readers"][name]
            lowered = self._forward.lower(name, part, frozen[name], fields, shared, key)
            programs[name] = Part(lowered, component.mesh)
        return programs


Step = Fused | Staged


def make(recipe: Recipe, placement: Placement, optimizer: optax.GradientTransformation, *, seed: int) -> Step:
    if not placement.on_several_meshes:
        return Fused(recipe, placement.learner, optimizer, seed)
    return Staged(recipe, placement, optimizer, seed)  # only of a recipe with branches


def _apply(
    optimizer: optax.GradientTransformation, state: State, gradients: Tree, terms: LossTerms
) -> tuple[State, dict[str, jax.Array]]:
    gradients = jax.tree.map(lambda leaf: leaf / terms.weight, gradients)
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["trainable"])
    after = {
        "trainable": optax.apply_updates(state["trainable"], updates),
        "opt_state": opt_state,
        "step": state["step"] + 1,
    }
    values = {name: total / weight for name, (total, weight) in terms.terms.items()}
    return after, {"loss": terms.sum / terms.weight, **values, "grad_norm": optax.tree.norm(gradients)}


def whole_gradient(recipe: Recipe) -> Callable[..., tuple[Tree, LossTerms]]:
    """Returns the function (trainable, frozen, batch, rng) -> (gradients, terms) of the whole loss."""

    def objective(trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array):
        terms = recipe.loss(trainable, frozen, batch, rng)
        return terms.sum, terms

    return jax.grad(objective, has_aux=True)


def _sequential_gradient(recipe: Recipe) -> Callable[..., tuple[Tree, LossTerms]]:
    """Returns the same function with the readers' forward and backward passes one after the other.

    Only one reader's activations are alive at a time; without the barrier XLA keeps all of them until the latents'
    gradient is summed (docs/numbers.md).
    """

    def gradient(trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> tuple[Tree, LossTerms]:
        beside = frozen.get(SHARED)
        shared, backward = jax.vjp(lambda learned: recipe.share(learned, batch["source"], rng, beside), trainable)
        gradients, cotangents, total = None, None, None
        for name, fields in batch["readers"].items():
            part, transpose = jax.vjp(functools.partial(recipe.part, name), trainable)
            (grads, cotangent), terms = branch_gradient(recipe, name, frozen[name], fields, rng)(part, shared)
            grads = transpose(grads)[0]
            gradients = grads if gradients is None else _add(gradients, grads)
            cotangents = cotangent if cotangents is None else _add(cotangents, cotangent)
            total = terms if total is None else total + terms
            shared, cotangents = jax.lax.optimization_barrier((shared, cotangents))
        return _add(gradients, backward(cotangents)[0]), cast(LossTerms, total)

    return gradient


def branch_gradient(recipe: Recipe, name: str, frozen: Tree, fields: Tree, rng: jax.Array):
    """Returns the function (part, shared) -> ((gradient of part, of shared), terms) of one reader's branch."""

    def objective(part: Tree, shared: Tree):
        terms = recipe.branch(name, part, frozen, fields, shared, rng)
        return terms.sum, terms

    return jax.grad(objective, argnums=(0, 1), has_aux=True)


def _accumulate(
    gradient: Callable[..., tuple[Tree, LossTerms]], trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array
) -> tuple[Tree, LossTerms]:
    """Sums gradients and loss terms over the micro-batches; each gets the `rng` of the step."""

    def micro_gradient(micro: Tree) -> tuple[Tree, LossTerms]:
        return gradient(trainable, frozen, micro, rng)

    count = jax.tree.leaves(batch)[0].shape[0]
    if count == 1:
        return micro_gradient(jax.tree.map(lambda leaf: leaf[0], batch))

    def add(total: Tree, micro: Tree) -> tuple[Tree, None]:
        return _add(total, micro_gradient(micro)), None

    shapes = jax.eval_shape(micro_gradient, jax.tree.map(lambda leaf: leaf[0], batch))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, _ = jax.lax.scan(add, nothing, batch)
    return total


def _is_replicated(recipe: Recipe) -> bool:
    return all(sharding.is_fully_replicated for sharding in jax.tree.leaves(recipe.shardings.trainable))


def _at(batch: Tree, index: jax.Array) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), batch)


def _add(left: Tree, right: Tree) -> Tree:
    return jax.tree.map(jnp.add, left, right)


def _shapes(tree: Tree, mesh: Mesh, spec: P) -> Tree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
