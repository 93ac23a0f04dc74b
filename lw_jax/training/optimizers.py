"""The optimizer as tables over the paths of the trainable tree: which leaf learns, how fast, with which decay."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lw_jax.core import config
from lw_jax.core.types import Tree
from sharding import rules

# (regex over paths, multiple of the learning rate; 0 freezes), or one multiple for each stage of the run
Rates = Sequence[tuple[str, float | tuple[float, ...]]]

# Vectors that set a scale or an offset, and embeddings, of which a batch sees only a few rows, do not decay.
_LASTING = re.compile(r".*(norm|scale|bias|gain|mix|queries|tasks|embed)|(.*/)?layers/(b\d|token)")

# Weights that are one matrix, and which axes are its rows; those behind them are its columns, one before counts layers.
# What none of these names (vectors, embeddings, a head, an inner model's first weights) is Adam's.
_MATRICES = (
    (re.compile(r".*/kernel"), slice(0, 1)),
    (re.compile(r"(.*/)?layers/o(/[ab])?"), slice(1, 2)),
    (re.compile(r"(.*/)?layers/(q|k|v|gate|up|down)(/[ab])?"), slice(1, -1)),
)
B1, EPS = 0.9, 1e-8  # of Adam: decay of the first moment, and what is added to the root of the second
_ITERATIONS = 5  # of Newton and Schulz a step, optax' own number
_AS_ADAM = 0.2  # RMS of a matrix' step before its rate: near Adam's, so that one rate serves both (arXiv 2502.16982)


def decays(tree: Tree, which: str = "matrices") -> Tree:
    """Returns for each leaf whether its weights decay; `which` is the config's word, optim.decays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: which == "all" or not _LASTING.fullmatch(rules.path_of(path)), tree
    )


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stage of the run: so many steps, their peak a multiple of the learning rate."""

    steps: int
    rate: float = 1.0


def schedule(cfg: config.Optim, phases: Sequence[Phase]) -> optax.Schedule:
    """In each phase a linear warm-up to its peak, then a cosine down to `end_fraction` of it at its last step.

    `count` is of the steps made so far, as optax counts: the first step's rate is at 0, the last one's at steps - 1.
    """
    curves = []
    for phase in phases:
        peak, warmup = cfg.learning_rate * phase.rate, min(cfg.warmup_steps, phase.steps)
        curves.append(
            optax.warmup_cosine_decay_schedule(
                0.0 if warmup else peak, peak, warmup, max(phase.steps, warmup + 1), peak * cfg.end_fraction
            )
        )

    def rate(count: jax.Array) -> jax.Array:
        number, inside = _place(phases, count)
        # The place inside a phase is counted from 1: a warm-up's first step already moves.
        return jnp.stack([curve(inside.astype(jnp.float32) + 1.0) for curve in curves])[number]

    return lambda count: rate(jnp.asarray(count, jnp.int32))


def matrix_axes(path: str, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns which axes of a leaf are its matrix' rows and columns; None where it is no matrix that Muon steps."""
    axes = tuple(range(ndim))
    rows = next((axes[rows] for pattern, rows in _MATRICES if pattern.fullmatch(path)), None)
    return None if rows is None else (rows, axes[rows[-1] + 1 :])


def _direction(cfg: config.Optim) -> optax.GradientTransformation:
    """Returns Adam, or Muon for the matrices and Adam for all else."""
    adam = optax.scale_by_adam(B1, cfg.b2, EPS)
    if cfg.kind == "adamw":
        return adam

    def each(of: Callable[[jax.Array, tuple | None], Any], tree: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: of(leaf, matrix_axes(rules.path_of(path), leaf.ndim)), tree
        )

    def sized(update: jax.Array, sides: tuple | None) -> jax.Array:
        # What is orthogonal has an RMS of one by the root of the longer side, whichever that is.
        longer = max(math.prod(update.shape[axis] for axis in side) for side in sides or ())
        return update * (_AS_ADAM * math.sqrt(longer))

    axes = functools.partial(each, lambda _, sides: optax.contrib.MuonDimensionNumbers(*sides) if sides else None)
    muon = optax.chain(
        optax.contrib.scale_by_muon(ns_steps=_ITERATIONS, weight_dimension_numbers=axes),
        optax.stateless(lambda updates, params: each(sized, updates)),
    )
    labels = functools.partial(each, lambda _, sides: "matrix" if sides else "other")
    return optax.partition({"matrix": muon, "other": adam}, labels)


def flops(cfg: config.Optim, rates: Rates, abstract: Tree) -> float:
    """Returns the products of one step: of Muon, five Newton-Schulz iterations of every matrix that learns.

    Of a matrix of a x b, a not above b, each has two products of a x a x b and one of a x a x a.
    """
    rows = rules.match(list(rates), abstract, name="learning rates")
    total = 0.0
    for (path, leaf), (_, multiple) in zip(_leaves(abstract), _leaves(rows), strict=True):
        sides = matrix_axes(rules.path_of(path), leaf.ndim) if cfg.kind == "muon" and any(_each(multiple, 1)) else None
        if sides:
            short, long = sorted(math.prod(leaf.shape[axis] for axis in side) for side in sides)
            total += _ITERATIONS * leaf.size / (short * long) * (4 * short**2 * long + 2 * short**3)
    return total


def make(cfg: config.Optim, *, phases: Sequence[Phase], rates: Rates, abstract: Tree) -> optax.GradientTransformation:
    """AdamW or Muon with clipping over the leaves of `abstract` whose rate is not 0; the others have no state.

    Where a leaf's rate is 0 in some phases alone, its gradient counts there in no norm and its moments and their
    count wait.

    Muon (`optim.kind`) steps a weight matrix along its momentum made orthogonal by five Newton-Schulz iterations.

    `rates` must cover every leaf and each of its rows must decide one, else `sharding.errors.PlacementError`.
    """
    rows = rules.match([(pattern, row) for row, (pattern, _) in enumerate(rates)], abstract, name="learning rates")
    table = [_each(multiple, len(phases)) for _, multiple in rates]
    row_of, decays_at = (
        {rules.path_of(path): value for path, value in _leaves(tree)} for tree in (rows, decays(abstract, cfg.decays))
    )

    def by_path(found: dict[str, Any]):
        # Under `partition` frozen leaves are missing from params, so the table is looked up by path.
        return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: found[rules.path_of(path)], params)

    direction: list[optax.GradientTransformation] = [optax.clip_by_global_norm(cfg.clip_norm), _direction(cfg)]
    trained = [tuple(map(bool, multiples)) for multiples in table]  # in which phases, of each row
    if any(any(one) and not all(one) for one in trained):
        name = ["in_" + "".join("01"[one] for one in each) for each in trained]
        parts: dict[Hashable, Any] = {
            name[row]: _in_phases(direction[1], each, phases) for row, each in enumerate(trained)
        }
        direction[1] = optax.partition(parts, by_path({path: name[row] for path, row in row_of.items()}))
        direction.insert(0, _scale_by(by_path(row_of), trained, phases))
    learning = optax.chain(
        *direction,
        optax.add_decayed_weights(cfg.weight_decay, mask=by_path(decays_at)),
        _scale_by(by_path(row_of), table, phases),
        optax.scale_by_learning_rate(schedule(cfg, phases)),
    )
    labels = jax.tree.map(lambda row: "learns" if any(table[row]) else "frozen", rows)
    whole = optax.partition({"learns": learning, "frozen": optax.set_to_zero()}, labels)

    def update(updates: Tree, state: optax.OptState, params: Tree | None = None, **extra: Any):
        # optax raises floats to integer step counts, which the strict promotion of our tests would refuse.
        with jax.numpy_dtype_promotion("standard"):
            return whole.update(updates, state, params, **extra)

    return optax.GradientTransformation(whole.init, update)


def _in_phases(
    inner: optax.GradientTransformation, trains: Sequence[bool], phases: Sequence[Phase]
) -> optax.GradientTransformation:
    """Runs `inner` in the phases that `trains` marks; in the others its updates are 0 and its state waits."""
    if all(trains):
        return inner

    def training(step: jax.typing.ArrayLike, **extra: Any) -> jax.Array:
        del extra
        return jnp.asarray(trains)[_place(phases, jnp.asarray(step))[0]]

    return optax.conditionally_mask(inner, training)


def _scale_by(rows, table: Sequence[Sequence[float]], phases: Sequence[Phase]) -> optax.GradientTransformation:
    """Scales each leaf by its row's multiple in the phase that the step is in."""

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None):
        number, _ = _place(phases, jnp.asarray(state.count))
        scaled = jax.tree.map(
            lambda update, row: update * jnp.asarray(table[row], jnp.float32)[number], updates, rows(params)
        )
        return scaled, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _place(phases: Sequence[Phase], count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which phase a step is in, and how many of its steps were made before; the last one has no end."""
    ends = np.cumsum([phase.steps for phase in phases])[:-1].astype(np.int32)
    number = jnp.sum(count >= jnp.asarray(ends), dtype=jnp.int32)
    return number, count - jnp.asarray(np.concatenate([[0], ends]).astype(np.int32))[number]


def _each(multiple: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    if isinstance(multiple, tuple):
        assert len(multiple) == count, "a multiple for each phase"
        return multiple
    return (multiple,) * count


def _leaves(tree: Tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]
