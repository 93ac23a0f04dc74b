"""Refusals of a run that has diverged or collapsed: non-finite loss or gradient, latents without information."""

import math

from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.training import preflight
from lw_jax.training.recipe import Recipe

REMEDY = (  # of a collapse
    "The checkpoint is kept. To continue anyway: --config.train.alarm=warn, or a later train.alarm_step. To repair: a "
    "lower optim.learning_rate, adapter.start='aligned', stages.pretrain.share, more examples"
)


def check_finite(step: int, values: Tree, cfg: Config, *, saved: int | None) -> None:
    """Raises UserError for a non-finite loss or gradient norm; `saved` is the newest checkpoint."""
    found = {name: float(value) for name, value in values.items()}
    wrong = [name for name, value in found.items() if not math.isfinite(value)]
    fatal = [name for name in ("loss", "grad_norm") if name in wrong]
    if not fatal:
        return
    line = f"step {step}: " + ", ".join(f"train/{name} is {found[name]}" for name in fatal)
    if others := [name for name in wrong if name not in fatal]:
        line += f" (so is {', '.join(others)})"
    if step == 1 and "loss" in fatal:
        raise UserError(
            f"{line}, before the first update: caused by a weight, an example or compute.dtype={cfg.compute.dtype}; "
            "load other weights, or set --config.compute.dtype=fp32"
        )
    checkpoint = "no checkpoint was saved yet" if saved is None else f"checkpoint {saved} is kept"
    raise UserError(
        f"{line}; {checkpoint}. Lower optim.learning_rate={cfg.optim.learning_rate} or "
        f"optim.clip_norm={cfg.optim.clip_norm}, or raise optim.warmup_steps"
    )


def find_collapse(step: int, validated: dict[str, float], cfg: Config, recipe: Recipe) -> str:
    """Returns the recipe's description of a collapse, from `preflight.alarm_step` on; empty where there is none."""
    alarm = preflight.alarm_step(cfg.train)
    if not alarm or step < alarm:
        return ""
    return recipe.collapse(step, validated)
