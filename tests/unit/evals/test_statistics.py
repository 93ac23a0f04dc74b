"""Bootstrap intervals against closed cases and a simulation whose truth is known."""

import math

import numpy as np
import pytest

from lw_jax.evals import statistics
from lw_jax.evals.statistics import Bootstrap, Estimate

ROUNDING = 1e-12  # sums of doubles in another order
# Of 300 simulated intervals; three standard errors of 95 % are 0.038, and percentile intervals are a little too short
COVERAGE = (0.89, 0.985)


def test_a_ratio_resamples_values_and_weights_together():
    tokens = np.array([1.0, 5.0, 2.0, 11.0, 3.0])
    low, high = Bootstrap(range(5), seed=0).ratio(2 * tokens, tokens).interval()
    assert low == pytest.approx(2, abs=ROUNDING) and high == pytest.approx(2, abs=ROUNDING)


def test_one_example_has_a_value_and_no_interval():
    one = Bootstrap(["a"], seed=0).mean(np.array([3.0]))
    assert one.value == 3.0 and one.interval() is None
    assert one.over(one).value == 1.0 and one.over(one).interval() is None


def test_questions_of_a_text_are_drawn_together():
    counts = Bootstrap(["a", "b", "a", "c", "b", "a"], seed=0).counts
    assert (counts[:, 0] == counts[:, 2]).all() and (counts[:, 0] == counts[:, 5]).all()
    assert (counts[:, 1] == counts[:, 4]).all() and (counts[:, 0] != counts[:, 1]).any()
    assert (counts[:, [0, 1, 3]].sum(axis=1) == 3).all()


def test_intervals_cover_the_true_mean_where_questions_share_their_texts(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 401)  # of each trial
    rng = np.random.default_rng(0)
    texts = np.repeat(np.arange(61), 8)
    covered = []
    for trial in range(300):
        values = 3.0 + rng.normal(size=61)[texts] + rng.normal(size=len(texts))
        low, high = Bootstrap(texts.tolist(), seed=trial).mean(values).interval()
        covered.append(low <= 3.0 <= high)
    assert COVERAGE[0] < np.mean(covered) < COVERAGE[1], "drawn one by one, questions cover it 0.64 of the time"


def test_paired_difference_is_narrower_than_that_of_unrelated_resamples():
    rng = np.random.default_rng(3)
    shared = rng.normal(size=53)  # what makes an example hard for both rows
    one, two = shared + 0.1 * rng.normal(size=53), shared + 0.1 * rng.normal(size=53)
    own, foreign = (Bootstrap(range(53), seed=seed) for seed in (0, 1))
    paired = (own.mean(one) - own.mean(two)).interval()
    unpaired = (own.mean(one) - foreign.mean(two)).interval()
    assert paired[1] - paired[0] < 0.3 * (unpaired[1] - unpaired[0])


@pytest.mark.parametrize(("undefined", "known"), [(2, True), (3, False)])
def test_undefined_resamples_count_against_both_ends(undefined, known):
    whole = np.full(100, 2.0)
    whole[:undefined] = -1.0
    assert math.isnan(Estimate(1.0, np.ones(100)).over(Estimate(0.0, np.zeros(100))).value)
    share = Estimate(1.0, np.arange(100.0)).over(Estimate(2.0, whole))
    assert share.value == 0.5
    assert share.interval() == ([1.0, 49.5] if known else None)  # of the defined 2/2, 3/2 .. 99/2 none is cut off
