"""Costs of a training step's and of validation's passes on one device, traced part by part."""

from collections.abc import Callable
from typing import Any

import jax

from lw_jax.core import rng as rngs
from lw_jax.core.types import SHARED, LossTerms, Tree
from lw_jax.training import train_step
from lw_jax.training.recipe import Recipe
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.traced_costs import Costs, nbytes, trace

# Recipes and costs of this process, by what shapes them: placements that differ in other parts share one.
_traced: dict[tuple[str, ...], Any] = {}


def on_one_device(step_spec: StepSpec) -> Recipe:
    make: Any = type(step_spec.recipe)
    placed = step_spec.placement.on_one_device(whole=not step_spec.recipe.splits_computation)
    key = (step_spec.recipe.shape_key, repr(placed))
    if key not in _traced:
        _traced[key] = make(step_spec.cfg, placed, outline=True)
    return _traced[key]


def of(step_spec: StepSpec, widths: Tree, rows: int, *, backward: bool = True) -> dict[str, Costs]:
    """Returns what so many rows on a device cost: what readers share under "", each reader's part by its name.

    `backward`: forward and backward, a micro-batch's; else forward alone, as validation runs it.
    """
    recipe, batch = on_one_device(step_spec), _batch(widths, rows)
    weights, rng, way = recipe.abstract, rngs.abstract(), "both" if backward else "forward"
    if not recipe.has_branches:
        (name,) = step_spec.placement.readers
        loss = train_step.whole_gradient(recipe) if backward else recipe.loss
        inputs = weights.trainable, weights.frozen, batch, rng
        return {"": Costs(), name: once(recipe, name, way, batch, lambda: trace(loss, *inputs))}
    source = weights.trainable, batch["source"], rng, weights.frozen.get(SHARED)

    def share(*args: Tree) -> Tree:
        shared, pull = _pull(recipe, *args)
        return pull(shared) if backward else shared

    def read(name: str) -> Costs:
        def branch(part: Tree, frozen: Tree, fields: Tree, shared: Tree, rng: Any) -> Tree | LossTerms:
            if not backward:
                return recipe.branch(name, part, frozen, fields, shared, rng)
            return train_step.branch_gradient(recipe, name, frozen, fields, rng)(part, shared)

        part = jax.eval_shape(lambda trainable: recipe.part(name, trainable), weights.trainable)
        shared = jax.eval_shape(recipe.share, *source)
        return trace(branch, part, weights.frozen[name], batch["readers"][name], shared, rng)

    costs = {"": once(recipe, "", way, batch["source"], lambda: trace(share, *source))}
    for name, fields in batch["readers"].items():
        costs[name] = once(recipe, name, way, (batch["source"], fields), lambda name=name: read(name))
    return costs


def kept_bytes(step_spec: StepSpec, widths: Tree, rows: int) -> int:
    """Returns the bytes that the shared part keeps for its backward pass while the readers run."""
    recipe = on_one_device(step_spec)
    if not recipe.has_branches:
        return 0
    weights, source = recipe.abstract, _batch(widths, rows)["source"]
    primals = weights.trainable, source, rngs.abstract(), weights.frozen.get(SHARED)

    def residuals() -> int:
        inputs = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(primals)}
        leaves = jax.tree.leaves(jax.eval_shape(lambda *args: _pull(recipe, *args)[1], *primals))
        return nbytes(leaf for leaf in leaves if (leaf.shape, leaf.dtype) not in inputs)

    return once(recipe, "", "kept", source, residuals)


def update(step_spec: StepSpec) -> Costs:
    shapes, optimizer = step_spec.recipe.abstract.trainable, step_spec.optimizer
    args = shapes, jax.eval_shape(optimizer.init, shapes), shapes
    return once(step_spec.recipe, "", "update", shapes, lambda: trace(optimizer.update, *args))


def _pull(recipe: Recipe, trainable: Tree, source: Tree, rng: Any, frozen: Tree) -> tuple[Tree, Callable]:
    return jax.vjp(lambda params: recipe.share(params, source, rng, frozen), trainable)


def once(recipe: Any, name: str, way: str, shapes: Tree, compute: Callable[[], Any]) -> Any:
    """Returns what `compute` does of a reader ("": of what they share) in this way, for equal shapes computed once."""
    parts = str(recipe.placement.readers[name].parts) if name else ""
    key = (recipe.shape_key, recipe.placement.platform, name, way, parts, repr(shapes))
    if key not in _traced:
        _traced[key] = compute()
    return _traced[key]


def _batch(widths: Tree, rows: int) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), widths)
