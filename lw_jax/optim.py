"""The optimizer as tables over the paths of the trainable tree: which leaf learns, how fast, with which decay."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lw_jax.core import config
from lw_jax.core.types import Tree
from sharding import rules

Rates = Sequence[tuple[str, float]]  # (regex over paths, multiple of the learning rate; 0 freezes)

# Vectors that set a scale or an offset, and embeddings, of which a batch sees only a few rows.
DECAY: Sequence[tuple[str, bool]] = ((r".*(norm|scale|bias|gain|mix|queries|embed)", False), (r".*", True))


def schedule(cfg: config.Optim, steps: int) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine down to `end_fraction` of it at the last step.

    `count` is of the steps made so far, as optax counts: the first step's rate is at 0, the last one's at steps - 1.
    """
    curve = optax.warmup_cosine_decay_schedule(
        0.0 if cfg.warmup_steps else cfg.learning_rate,
        cfg.learning_rate,
        cfg.warmup_steps,
        max(steps, cfg.warmup_steps + 1),
        cfg.learning_rate * cfg.end_fraction,
    )
    return lambda count: curve(jnp.asarray(count, jnp.float32) + 1.0)


def make(cfg: config.Optim, *, steps: int, rates: Rates, abstract: Tree) -> optax.GradientTransformation:
    """AdamW with clipping over the leaves of `abstract` whose rate is not 0; the others have no optimizer state.

    Both tables must cover every leaf and every row of `rates` must decide one, else `sharding.errors.PlacementError`.
    """
    multiples = rules.match(rates, abstract, name="learning rates")
    decays = rules.match(DECAY, abstract, name="weight decay")
    by_path = {
        rules.path_of(path): value for path, value in jax.tree_util.tree_flatten_with_path((multiples, decays))[0]
    }

    def values(part: int):
        # Under `partition` frozen leaves are missing from params, so the table is looked up by path.
        return lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: by_path[f"{part}/{rules.path_of(path)}"], params
        )

    learning = optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
        optax.add_decayed_weights(cfg.weight_decay, mask=values(1)),
        _scale_by(values(0)),
        optax.scale_by_learning_rate(schedule(cfg, steps)),
    )
    labels = jax.tree.map(lambda multiple: "learns" if multiple else "frozen", multiples)
    whole = optax.partition({"learns": learning, "frozen": optax.set_to_zero()}, labels)

    def update(updates: Tree, state: optax.OptState, params: Tree | None = None, **extra: Any):
        # optax raises floats to integer step counts, which the strict promotion of our tests would refuse.
        with jax.numpy_dtype_promotion("standard"):
            return whole.update(updates, state, params, **extra)

    return optax.GradientTransformation(whole.init, update)


def _scale_by(multiples) -> optax.GradientTransformation:
    def update(updates, params):
        return jax.tree.map(lambda update, multiple: update * multiple, updates, multiples(params))

    return optax.stateless(update)
