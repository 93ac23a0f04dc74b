"""Rank and cosines of latents against closed cases and against plain loops over pairs."""

import math

import numpy as np
import pytest

from lw_jax.evals import geometry

CLOSE = 1e-6  # fp32 latents, sums in double


def draw(count=5, slots=3, width=7, seed=0):
    return np.random.default_rng(seed).normal(size=(count, slots, width)).astype(np.float32)


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a @ b / math.sqrt((a @ a) * (b @ b))


def test_nearly_collapsed_encoder_is_told_although_centring_magnifies_its_noise():
    found = geometry.describe(np.repeat(draw(1), 5, axis=0) + 1e-5 * draw())
    assert found["effective_rank"] > 3
    assert found["effective_rank_uncentred"] < 1.01
    assert found["input_cosine"] > 0.999


def test_inputs_in_directions_of_their_own_have_full_rank_and_no_cosine():
    latents = np.zeros((5, 1, 7), np.float32)
    latents[np.arange(5), 0, np.arange(5)] = 2.0
    found = geometry.describe(latents)
    assert found["effective_rank_uncentred"] == pytest.approx(5.0)
    assert found["effective_rank"] == pytest.approx(4.0)  # centring takes one direction
    assert found["input_cosine"] == pytest.approx(0.0, abs=CLOSE)


def test_effective_rank_is_exp_of_the_entropy_of_singular_values():
    rotation, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(7, 7)))
    rows = np.diag([3.0, 1.0, 0.0, 0.0, 0.0]) @ rotation[:5]
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert geometry.effective_rank(rows) == pytest.approx(math.exp(entropy))


@pytest.mark.parametrize("shape", [(3, 500), (500, 3)])
def test_rank_of_many_latents_is_that_of_the_fewer_of_rows_and_columns(monkeypatch, shape):
    decomposed, eigvalsh = [], np.linalg.eigvalsh
    monkeypatch.setattr(np.linalg, "eigvalsh", lambda matrix: decomposed.append(matrix.shape) or eigvalsh(matrix))
    monkeypatch.setattr(np.linalg, "svd", None)
    rows = np.zeros(shape)
    rows[0, 0] = rows[2, 2] = 1e-3
    assert geometry.effective_rank(rows) == pytest.approx(2.0)
    assert decomposed == [(3, 3)]


def test_slot_similarity_is_the_mean_over_messages():
    latents = draw()
    found = geometry.slot_similarity(latents)
    expected = [[np.mean([cosine(one[i], one[j]) for one in latents]) for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(found, expected, atol=CLOSE)
    apart = [expected[i][j] for i in range(3) for j in range(3) if i != j]
    assert geometry.describe(latents)["slot_cosine"] == pytest.approx(np.mean(apart), abs=CLOSE)


def test_one_input_of_one_slot_has_no_pairs_and_an_empty_slot_no_direction():
    found = geometry.describe(draw(1, 1))
    assert found["input_cosine"] is None and found["slot_cosine"] is None and found["inputs"] == 1
    empty = draw()
    empty[:, 1] = 0
    assert np.isfinite([value for value in geometry.describe(empty).values() if value is not None]).all()
