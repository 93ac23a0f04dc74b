"""Losses against the same mathematics in numpy, double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax import losses

SAME = 1e-5  # fp32 sums of a few hundred terms of unit size
B, T, V = 3, 5, 7


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    logits, teacher = (jnp.asarray(rng.normal(size=(B, T, V)) * 3, jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.integers(0, 2, (B, T)), jnp.float32).at[0, 0].set(1.0).at[1, 1].set(0.0)
    return logits, teacher, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32), weights


def test_nll_is_the_weighted_sum_and_the_weight(case):
    logits, _, targets, weights = case
    each = -np.take_along_axis(log_softmax(logits), np.asarray(targets)[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(losses.token_nll(logits, targets), each, atol=SAME)
    total, count = losses.nll(logits, targets, weights)
    assert float(total) == pytest.approx(float((each * weights).sum()), rel=SAME)
    assert float(count) == float(np.asarray(weights).sum()) not in (0, B * T)


def test_nll_of_large_bf16_logits_is_measured_in_fp32(case):
    _, _, targets, weights = case
    logits = jnp.zeros((B, T, V), jnp.bfloat16).at[:, :, 0].set(1000.0)
    total, _ = losses.nll(logits, jnp.zeros_like(targets), weights)
    assert total.dtype == jnp.float32 and float(total) == 0.0
    total, count = losses.nll(logits, jnp.ones_like(targets), weights)
    assert float(total) == 1000.0 * float(count)


def test_hits_weigh_the_targets_that_are_the_argmax(case):
    logits, _, _, weights = case
    best = jnp.argmax(logits, axis=2).astype(jnp.int32)
    assert losses.hits(logits, best, weights) == (weights.sum(), weights.sum())
    missed = best.at[0, 0].set((best[0, 0] + 1) % V)
    assert losses.hits(logits, missed, 3 * weights) == (3 * weights.sum() - 3, 3 * weights.sum())
    unweighted = best.at[1, 1].set((best[1, 1] + 1) % V)
    assert losses.hits(logits, unweighted, weights)[0] == weights.sum()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_kl_is_that_of_teacher_from_student_times_temperature_squared(case, temperature):
    logits, teacher, _, weights = case
    p, q = log_softmax(np.asarray(teacher) / temperature), log_softmax(np.asarray(logits) / temperature)
    each = (np.exp(p) * (p - q)).sum(axis=2)
    assert (each > 0).all()
    total, count = losses.kl(teacher, logits, weights, temperature=temperature)
    assert float(total) == pytest.approx(temperature**2 * float((each * weights).sum()), rel=SAME)
    assert float(count) == float(weights.sum())


def test_kl_of_equal_distributions_is_zero(case):
    logits, _, _, weights = case
    shifted = logits + 4.0  # the same distribution
    assert abs(float(losses.kl(logits, shifted, weights, temperature=1.0)[0])) < SAME * B * T


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_gradient_of_kl_is_the_difference_of_softmaxes(case, temperature):
    logits, teacher, _, weights = case
    gradient = jax.grad(lambda student: losses.kl(teacher, student, weights, temperature=temperature)[0])(logits)
    p, q = (np.exp(log_softmax(np.asarray(x) / temperature)) for x in (teacher, logits))
    np.testing.assert_allclose(gradient, temperature * (q - p) * np.asarray(weights)[:, :, None], atol=SAME)
