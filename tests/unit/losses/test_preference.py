"""Preference losses against vectors that TRL's own trainer made (tests/reference), and what is known without it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core import config, validation
from lw_jax.losses import preference

REFERENCE = json.loads((Path(__file__).parents[2] / "reference" / "trl_dpo.json").read_text(encoding="utf-8"))
SAME = 1e-6  # relative: one fp32 rounding of beta and of the margin; the log-probabilities themselves are exact in fp32
CANCELLED = 1e-7  # absolute, times beta for gradients: fp32's rounding of terms of size 1 that cancel in a sum
CASES = [
    pytest.param(case, id=f"{version}-{case['kind']}-{case['beta']}-{case['label_smoothing']}")
    for version, part in REFERENCE["trl"].items()
    for case in part["cases"]
]
BATCHES = [
    pytest.param(batch, id="+".join(batch["kinds"]))
    for part in REFERENCE["trl"].values()
    for batch in part.get("batches", [])
]
BETA = 0.1


def read_pairs() -> preference.LogProbs:
    return preference.LogProbs(**{name: jnp.asarray(row, jnp.float32) for name, row in REFERENCE["pairs"].items()})


def make_pairs(chosen, rejected) -> preference.LogProbs:
    """Pairs of these log-ratios, 7 and 3 tokens long."""
    chosen, rejected = (jnp.asarray(ratio, jnp.float32) for ratio in (chosen, rejected))
    one = jnp.ones_like(chosen)
    return preference.LogProbs(chosen - 8, rejected - 4, -8 * one, -4 * one, 7 * one, 3 * one)


def differentiate(logps, each_of):
    """Returns the losses of each pair, and the gradients of their sum by chosen and rejected log-probabilities."""

    def total(chosen, rejected):
        each = each_of(logps._replace(chosen=chosen, rejected=rejected))
        return each.sum(), each

    graded = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, each), gradients = graded(logps.chosen, logps.rejected)
    return each, *gradients


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_trl(case):
    beta, smoothing = case["beta"], case["label_smoothing"]
    found = differentiate(read_pairs(), lambda logps: preference.LOSSES[case["kind"]](logps, beta, smoothing))
    for name, ours in zip(("loss", "chosen", "rejected"), found, strict=True):
        assert ours.dtype == jnp.float32
        scale = 1.0 if name == "loss" else beta
        np.testing.assert_allclose(ours, case[name], rtol=SAME, atol=CANCELLED * scale, err_msg=name)


@pytest.mark.parametrize("batch", [param for param in BATCHES if "sft" not in param.values[0]["kinds"]])
def test_mixture_is_that_of_trl(batch):
    found = differentiate(
        read_pairs(),
        lambda logps: preference.combined(
            tuple(batch["kinds"]), tuple(batch["weights"]), logps, beta=batch["beta"], label_smoothing=0.0
        ),
    )
    pairs = len(batch["chosen"])
    np.testing.assert_allclose(found[0].mean(), batch["loss"], rtol=SAME)
    for name, ours in zip(("chosen", "rejected"), found[1:], strict=True):
        np.testing.assert_allclose(ours / pairs, batch[name], rtol=SAME, atol=CANCELLED * batch["beta"], err_msg=name)


@pytest.mark.parametrize("batch", BATCHES[:1])
def test_metrics_are_those_of_trl(batch):
    ours = preference.metrics(read_pairs(), beta=batch["beta"])
    assert ours.keys() == batch["metrics"].keys()
    for name, each in ours.items():
        np.testing.assert_allclose(each.mean(), batch["metrics"][name], rtol=SAME, atol=CANCELLED, err_msg=name)


@pytest.mark.parametrize("kind", sorted(set(preference.LOSSES) - set(validation.SMOOTHED)))
def test_kinds_that_do_not_smooth_are_unchanged_by_it(kind):
    plain, smoothed = (preference.LOSSES[kind](read_pairs(), BETA, smoothing) for smoothing in (0.0, 0.1))
    assert (plain == smoothed).all()


def test_equal_rewards_are_not_accurate():
    accurate = preference.metrics(make_pairs([1.0, 0.0, 2.0], [0.0, 1.0, 2.0]), beta=BETA)["rewards/accuracies"]
    assert accurate.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", preference.LOSSES)
def test_extreme_margins_have_finite_gradients(kind):
    pairs = make_pairs([1e4, -1e4, 0.0, 1e4], [0.0, 0.0, 1e4, -1e4])
    found = differentiate(pairs, lambda logps: preference.LOSSES[kind](logps, 1.0, 0.1))
    assert all(np.isfinite(value).all() for value in found)


def test_losses_are_those_that_a_configuration_may_name():
    assert {"dpo.loss": tuple(preference.LOSSES)}.items() <= {e.path: e.key.choices for e in config.entries()}.items()
