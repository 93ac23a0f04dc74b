"""Losses against the same mathematics in numpy, double precision."""

import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.losses import token_losses

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
    np.testing.assert_allclose(token_losses.token_nll(logits, targets), each, atol=SAME)
    total, count = token_losses.nll(logits, targets, weights)
    assert float(total) == pytest.approx(float((each * weights).sum()), rel=SAME)
    assert float(count) == float(np.asarray(weights).sum()) not in (0, B * T)


def test_nll_of_large_bf16_logits_is_measured_in_fp32(case):
    _, _, targets, weights = case
    logits = jnp.zeros((B, T, V), jnp.bfloat16).at[:, :, 0].set(1000.0)
    total, _ = token_losses.nll(logits, jnp.zeros_like(targets), weights)
    assert total.dtype == jnp.float32 and float(total) == 0.0
    total, count = token_losses.nll(logits, jnp.ones_like(targets), weights)
    assert float(total) == 1000.0 * float(count)


def test_hits_weigh_the_targets_that_are_the_argmax(case):
    logits, _, _, weights = case
    best = jnp.argmax(logits, axis=2).astype(jnp.int32)
    assert token_losses.hits(logits, best, weights) == (weights.sum(), weights.sum())
    missed = best.at[0, 0].set((best[0, 0] + 1) % V)
    assert token_losses.hits(logits, missed, 3 * weights) == (3 * weights.sum() - 3, 3 * weights.sum())
    unweighted = best.at[1, 1].set((best[1, 1] + 1) % V)
    assert token_losses.hits(logits, unweighted, weights)[0] == weights.sum()


def test_kl_is_that_of_teacher_from_student(case):
    logits, teacher, _, weights = case
    p, q = log_softmax(teacher), log_softmax(logits)
    each = (np.exp(p) * (p - q)).sum(axis=2)
    assert (each > 0).all()
    total, count = token_losses.kl(teacher, logits, weights)
    assert float(total) == pytest.approx(float((each * weights).sum()), rel=SAME)
    assert float(count) == float(weights.sum())


def top(teacher, count):
    """A teacher's likeliest tokens, as `recipes.teacher` keeps them."""
    logp = log_softmax(teacher)
    ids = np.argsort(-logp, axis=2)[:, :, :count]
    kept = jnp.asarray(np.take_along_axis(logp, ids, axis=2), jnp.float32)
    return jnp.asarray(ids, jnp.int32), kept


def test_kl_of_all_kept_tokens_is_the_whole_kl_and_of_fewer_a_lower_bound(case):
    logits, teacher, _, weights = case
    whole, count = token_losses.kl(teacher, logits, weights)
    found = [float(token_losses.kl_of_top(*top(teacher, k), logits, weights)[0]) for k in range(1, V + 1)]
    assert found[-1] == pytest.approx(float(whole), rel=SAME)
    assert found == sorted(found), "each more token tells more"
    assert 0 < found[0] < 0.9 * found[-1]
    _, weight = token_losses.kl_of_top(*top(teacher, 3), logits, weights)
    assert float(weight) == float(count)
