"""Optimizer from tables over parameter paths: trainable leaves, learning rate multipliers, weight decay, schedule."""

import dataclasses
import itertools
import math
import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lw_jax.core import config
from lw_jax.core.types import Tree
from sharding import rules

# (regex over paths, learning rate multiplier; 0 freezes), or one multiplier per phase of the run
Rates = Sequence[tuple[str, float | tuple[float, ...]]]

# No weight decay: scales, offsets, what is computed and not learned (rarity), a code's closed form, and embeddings, of
# which a batch reads only a few rows.
_NO_DECAY = re.compile(
    r"codes/.*|.*(norm|scale|shift|rarity|bias|gain|mix|queries|tasks|embed)|(.*/)?layers/(b\d|token)"
)

# Matrices and their row axes; the axes behind are columns, an axis before them counts layers. Other leaves (vectors,
# embeddings, heads, initial weights of an inner model) are updated by Adam.
_MATRICES = (
    (re.compile(r".*/kernel"), slice(0, 1)),
    (re.compile(r"(.*/)?layers/o(/[ab])?"), slice(1, 2)),
    (re.compile(r"(.*/)?layers/(q|k|v|gate|up|down|out_gate)(/[ab])?"), slice(1, -1)),
)
B1, EPS = 0.9, 1e-8  # of Adam: decay of the first moment, and what is added to the root of the second
_AS_ADAM = 0.2  # RMS of a matrix update, as Adam's: one learning rate serves both (arXiv 2502.16982)


def decays(tree: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, _: not _NO_DECAY.fullmatch(rules.path_of(path)), tree)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps of a stage and the multiplier of their peak learning rate."""

    steps: int
    rate: float = 1.0


def schedule(cfg: config.Optim, phases: Sequence[Phase]) -> optax.Schedule:
    """In each phase a linear warm-up to its peak, then a cosine to `end_fraction` of it at its last step.

    The argument counts completed steps, as in optax: 0 for the first step, steps - 1 for the last one.
    """
    curves = []
    for phase in phases:
        peak, warmup = cfg.learning_rate * phase.rate, min(cfg.warmup_steps, phase.steps)
        curves.append(
            optax.warmup_cosine_decay_schedule(
                0.0 if warmup else peak, peak, warmup, max(phase.steps, warmup + 1), peak * cfg.end_fraction
            )
        )
    # Counted from 1 inside a phase: the first step of a warm-up has a rate above 0.
    from_one = [lambda count, curve=curve: curve(count + 1.0) for curve in curves]
    joined = optax.join_schedules(from_one, _ends(phases))
    return lambda count: joined(jnp.asarray(count, jnp.float32))


def _matrix_axes(path: tuple, leaf: jax.Array) -> tuple[tuple[int, ...], ...]:
    """Returns the row and the column axes of a leaf; nothing where Muon does not update it."""
    name, axes = rules.path_of(path), tuple(range(leaf.ndim))
    rows = next((axes[rows] for pattern, rows in _MATRICES if pattern.fullmatch(name)), None)
    return () if rows is None else (rows, axes[rows[-1] + 1 :])


def _muon() -> optax.GradientTransformation:
    def axes(tree: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: optax.contrib.MuonDimensionNumbers(*_matrix_axes(path, leaf)), tree
        )

    def sized(path: tuple, update: jax.Array) -> jax.Array:
        # The RMS of an orthogonal matrix is one by the square root of its longer side.
        longer = max(math.prod(update.shape[axis] for axis in side) for side in _matrix_axes(path, update))
        return update * (_AS_ADAM * math.sqrt(longer))

    return optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=axes),
        optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(sized, updates)),
    )


def learned(rates: Rates, abstract: Tree) -> list[Any]:
    """Returns the leaves that have a rate above 0 in some phase."""
    learns = rules.match([(path, bool(np.any(rate))) for path, rate in rates], abstract, name="learning rates")
    return [leaf for leaf, flag in zip(jax.tree.leaves(abstract), jax.tree.leaves(learns), strict=True) if flag]


def make(
    cfg: config.Optim, *, phases: Sequence[Phase], rates: Rates, abstract: Tree, decays_all: bool = False
) -> optax.GradientTransformation:
    """AdamW or Muon with clipping over the leaves of `abstract` whose rate is not 0; the others have no state.

    In a phase where a leaf's rate is 0, its gradient is not part of the global norm and its moments and their count
    do not change.

    Muon (`optim.kind`) orthogonalises the momentum of a matrix by five Newton-Schulz iterations. With `decays_all`
    weight decay reaches every leaf that learns, not matrices alone.

    Raises `sharding.errors.PlacementError` unless `rates` covers every leaf and each of its rows decides one.
    """
    rows = rules.match([(pattern, row) for row, (pattern, _) in enumerate(rates)], abstract, name="learning rates")
    table = [each if isinstance(each, tuple) else (each,) * len(phases) for _, each in rates]
    assert {len(multipliers) for multipliers in table} <= {len(phases)}, "a multiplier for each phase"
    trains = [tuple(map(bool, multiples)) for multiples in table]  # in which phases, of each row

    def group(path: tuple, leaf: jax.Array, row: int) -> str:
        if not any(trains[row]):
            return "frozen"
        by_muon = cfg.kind == "muon" and _matrix_axes(path, leaf)
        return "_".join(("muon" if by_muon else "adam", *("01"[flag] for flag in trains[row])))

    labels = jax.tree_util.tree_map_with_path(group, abstract, rows)
    parts: dict[Hashable, Any] = {"frozen": optax.set_to_zero()}
    for label, row in zip(jax.tree.leaves(labels), jax.tree.leaves(rows), strict=True):
        if label not in parts:
            direction = _muon() if label.startswith("muon") else optax.scale_by_adam(B1, cfg.b2, EPS)
            parts[label] = _in_phases(direction, trains[row], phases)
    frozen = jax.tree.map(lambda label: label == "frozen", labels)
    decayed = jax.tree.map(lambda decay, still: (decays_all or decay) and not still, decays(abstract), frozen)
    waits = any(any(flags) and not all(flags) for flags in trains)
    whole = optax.chain(
        optax.masked(optax.set_to_zero(), frozen),  # what is frozen or waits is no part of the norm
        _scale_by(rows, trains, phases) if waits else optax.identity(),
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.partition(parts, labels),
        optax.add_decayed_weights(cfg.weight_decay, decayed),
        _scale_by(rows, table, phases),
        optax.scale_by_learning_rate(schedule(cfg, phases)),
    )
    # optax raises floats to integer step counts, which the strict promotion of our tests would refuse.
    return optax.GradientTransformation(whole.init, jax.numpy_dtype_promotion("standard")(whole.update))


def _in_phases(
    inner: optax.GradientTransformation, trains: Sequence[bool], phases: Sequence[Phase]
) -> optax.GradientTransformation:
    """Applies `inner` in the phases that `trains` marks; in the others updates are 0 and its state is unchanged."""
    if all(trains):
        return inner

    def training(step: jax.typing.ArrayLike, **extra: Any) -> jax.Array:
        del extra
        return jnp.asarray(trains)[_locate(phases, jnp.asarray(step))]

    return optax.conditionally_mask(inner, training)


def _scale_by(rows: Tree, table: Sequence[Sequence[float]], phases: Sequence[Phase]) -> optax.GradientTransformation:
    """Scales each leaf by the multiplier of its row in the phase of the step; of frozen rows it is 0 already."""

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None):
        del params
        number = _locate(phases, jnp.asarray(state.count))
        scaled = jax.tree.map(
            lambda update, row: update * jnp.asarray(table[row], jnp.float32)[number] if any(table[row]) else update,
            updates,
            rows,
        )
        return scaled, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _ends(phases: Sequence[Phase]) -> list[int]:
    """Returns the step after each phase; the last one has no end."""
    return list(itertools.accumulate(phase.steps for phase in phases[:-1]))


def _locate(phases: Sequence[Phase], count: jax.Array) -> jax.Array:
    """Returns the number of a step's phase."""
    return jnp.sum(count >= jnp.asarray(_ends(phases), jnp.int32), dtype=jnp.int32)
