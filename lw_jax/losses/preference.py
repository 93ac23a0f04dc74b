"""Losses on pairs of completions, by the names of TRL's DPOTrainer, from summed log-probabilities, in fp32.

A log-ratio is a completion's log-probability under the policy less that under the reference; the margin is the chosen
one's log-ratio less the rejected one's. Values and gradients are those of TRL 1.16.0 (`tests/reference`) but for two:

- `sigmoid` honours label smoothing (conservative DPO), as TRL did up to 0.19; later versions smooth `robust` alone.
- `sft` is a mean over each pair's own tokens, where TRL takes one mean over all tokens that a device holds at once: the
  same for one pair at a time or equal lengths. TRL's value changes with the micro-batch; `sft` here does not.

`bco_pair` is that of TRL 1: no running mean of the rewards is subtracted, as it was in 0.19.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Each = Float[Array, " b"]


class LogProbs(NamedTuple):
    """Log-probabilities of a batch of pairs, summed over completion tokens, and token counts."""

    chosen: Each
    rejected: Each
    ref_chosen: Each
    ref_rejected: Each
    chosen_tokens: Each
    rejected_tokens: Each


Loss = Callable[[LogProbs, float, float], Each]  # log-probabilities, beta, label smoothing


def _ratios(logps: LogProbs) -> tuple[Each, Each]:
    return logps.chosen - logps.ref_chosen, logps.rejected - logps.ref_rejected


def _margin(logps: LogProbs) -> Each:
    chosen, rejected = _ratios(logps)
    return chosen - rejected


def _mean_margin(logps: LogProbs) -> Each:
    chosen, rejected = _ratios(logps)
    return chosen / jnp.maximum(logps.chosen_tokens, 1.0) - rejected / jnp.maximum(logps.rejected_tokens, 1.0)


def _sigmoid(logps: LogProbs, beta: float, smoothing: float) -> Each:
    margin = beta * _margin(logps)
    return -(1.0 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)


def _robust(logps: LogProbs, beta: float, smoothing: float) -> Each:
    margin = beta * _margin(logps)
    unbiased = (1.0 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
    return -unbiased / (1.0 - 2.0 * smoothing)


def _sigmoid_norm(logps: LogProbs, beta: float, smoothing: float) -> Each:
    return -jax.nn.log_sigmoid(beta * _mean_margin(logps))


def _ipo(logps: LogProbs, beta: float, smoothing: float) -> Each:
    return jnp.square(_mean_margin(logps) - 0.5 / beta)


def _hinge(logps: LogProbs, beta: float, smoothing: float) -> Each:
    return jax.nn.relu(1.0 - beta * _margin(logps))


def _apo_zero(logps: LogProbs, beta: float, smoothing: float) -> Each:
    chosen, rejected = rewards(logps, beta=beta)
    return jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)


def _apo_down(logps: LogProbs, beta: float, smoothing: float) -> Each:
    chosen, _ = rewards(logps, beta=beta)
    return jax.nn.sigmoid(chosen) + jax.nn.sigmoid(-beta * _margin(logps))


def _nca_pair(logps: LogProbs, beta: float, smoothing: float) -> Each:
    chosen, rejected = rewards(logps, beta=beta)
    falling = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
    return -jax.nn.log_sigmoid(chosen) - 0.5 * falling


def _bco_pair(logps: LogProbs, beta: float, smoothing: float) -> Each:
    chosen, rejected = rewards(logps, beta=beta)
    return -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected)


def _sft(logps: LogProbs, beta: float, smoothing: float) -> Each:
    return -logps.chosen / jnp.maximum(logps.chosen_tokens, 1.0)


LOSSES: dict[str, Loss] = {
    "sigmoid": _sigmoid,  # Rafailov et al. 2023; smoothed: Mitchell 2023
    "ipo": _ipo,  # Azar et al. 2024, of log-ratios per token
    "hinge": _hinge,  # Zhao et al. 2023 (SLiC)
    "robust": _robust,  # Chowdhury et al. 2024
    "sigmoid_norm": _sigmoid_norm,
    "apo_zero": _apo_zero,  # D'Oosterlinck et al. 2024, both
    "apo_down": _apo_down,
    "nca_pair": _nca_pair,  # Chen et al. 2024
    "bco_pair": _bco_pair,  # Jung et al. 2024
    "sft": _sft,  # TRL 0.19's rpo_alpha is its weight
}


def combined(
    kinds: tuple[str, ...], weights: tuple[float, ...], logps: LogProbs, *, beta: float, label_smoothing: float
) -> Each:
    """Weighted sum of losses of each pair, a weight for each; `core.validation` checks ranges and combinations."""
    total = jnp.zeros_like(logps.chosen)
    for kind, weight in zip(kinds, weights, strict=True):
        total = total + weight * LOSSES[kind](logps, beta, label_smoothing)
    return total


def rewards(logps: LogProbs, *, beta: float) -> tuple[Each, Each]:
    """Implicit rewards of the chosen and of the rejected completions: beta times their log-ratios."""
    chosen, rejected = _ratios(logps)
    return beta * chosen, beta * rejected


def metrics(logps: LogProbs, *, beta: float) -> dict[str, Each]:
    """Metrics of each pair by TRL's names; a pair of equal rewards is not accurate."""
    chosen, rejected = rewards(logps, beta=beta)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "logps/chosen": logps.chosen,
        "logps/rejected": logps.rejected,
    }
