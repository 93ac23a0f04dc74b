"""lw_jax/evals/ngrams.py: proper distributions, exact sums, and a bigram worth beating."""

import dataclasses

import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.evals import ngrams
from lw_jax.evals.ngrams import fit

VOCAB = 13
NEVER = 11  # a token that does not occur
TOLERANCE = 1e-12  # float64 sums of 13 terms
FLOAT32 = 1e-6  # relative: what nll is rounded to


def chain(count, seed, vocab=VOCAB, sharpness=0.2):
    """Draws a Markov chain over all tokens but NEVER; returns it with its matrix."""
    rng = np.random.default_rng(5)
    matrix = rng.dirichlet(np.full(vocab, sharpness), vocab)
    matrix[:, NEVER] = 0
    matrix /= matrix.sum(1, keepdims=True)
    steps, ids = np.random.default_rng(seed).random(count), np.zeros(count, np.int32)
    for i in range(1, count):
        ids[i] = min(np.searchsorted(matrix[ids[i - 1]].cumsum(), steps[i]), vocab - 1)
    return ids, matrix


@pytest.fixture(scope="module")
def model():
    return fit(chain(997, 1)[0], VOCAB, tune=chain(211, 2)[0])


def test_probabilities_over_the_vocabulary_sum_to_one_for_seen_and_unseen_histories(model):
    tokens = np.arange(VOCAB)
    assert model.totals[NEVER] == 0 and (model.totals > 0).sum() == VOCAB - 1
    for history in range(VOCAB):
        values = model.probability(np.full(VOCAB, history), tokens)
        assert values.min() > 0
        assert abs(values.sum() - 1) < TOLERANCE
    assert abs(model.unigram.sum() - 1) < TOLERANCE and model.unigram.min() > 0


def test_counts_are_those_of_the_text():
    ids = np.array([2, 1, 2, 1, 0, 2, 2], np.int32)
    model = dataclasses.replace(fit(ids, 4, tune=ids), discount=0.5)
    np.testing.assert_allclose(model.unigram, np.array([2, 3, 5, 1]) / 11)
    follows = np.array([2, 2, 4, 1]) / 9  # 0 after 1; 1 after 2; 2 after 0, 1 and 2; and one each
    np.testing.assert_allclose(model.follows, follows)
    # after 2: twice 1, once 2
    histories, tokens = np.array([2, 2, 2, 3]), np.array([1, 2, 0, 1])
    share = 0.5 * 2 / 3
    expected = [1.5 / 3 + share * follows[1], 0.5 / 3 + share * follows[2], share * follows[0], follows[1]]
    np.testing.assert_allclose(model.probability(histories, tokens), expected)


def test_bigram_comes_near_the_entropy_of_a_chain_and_far_below_the_unigram():
    ids, matrix = chain(40_009, 4)
    model = fit(ids, VOCAB, tune=chain(2003, 5)[0])
    held = chain(20_011, 6)[0]
    true = -np.log(matrix[held[:-1], held[1:]]).mean()
    found = {name: float(values[0]) / (len(held) - 1) for name, values in model.nll(held[None]).items()}
    assert true < found["bigram"] < true + 0.01 < found["unigram"] - 0.3
    np.testing.assert_allclose(found["unigram"], -np.log(model.unigram[held[1:]]).mean(), rtol=FLOAT32)


def test_discount_is_the_best_for_the_text_set_apart():
    ids, tune = chain(307, 7, sharpness=1.0)[0], chain(1009, 8, sharpness=1.0)[0]
    model = fit(ids, VOCAB, tune=tune)
    at = {d: float(dataclasses.replace(model, discount=d).nll(tune[None])["bigram"][0]) for d in ngrams.DISCOUNTS}
    assert at[model.discount] == min(at.values()) < min(at[ngrams.DISCOUNTS[0]], at[ngrams.DISCOUNTS[-1]])
    assert fit(ids, VOCAB, tune=ids).discount < model.discount, "what was counted needs less"


def test_large_vocabulary_takes_the_room_of_its_pairs():
    vocab = 3_000_017  # squared it is beyond 32 bits, and beyond any table
    rng = np.random.default_rng(0)
    ids = (rng.zipf(1.3, 20_011) * 7919 % vocab).astype(np.int32)
    ids[-1] = vocab - 1
    model = fit(ids, vocab, tune=ids[:1009])
    assert len(model.pairs) < 20_011 and np.all(np.diff(model.pairs) > 0)
    pairs = {(h, t) for h, t in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)}
    assert {divmod(code, vocab) for code in model.pairs.tolist()} == pairs
    total = model.probability(np.full(vocab, ids[0]), np.arange(vocab)).sum()
    assert abs(total - 1) < 1e-9  # float64 over three million terms


@pytest.mark.parametrize(
    ("ids", "tune", "named"),
    [([1], [1, 2], "ids"), ([1, 2], [3], "tune"), ([1, 13], [1, 2], "ids"), ([1, 2], [-1, 2], "tune")],  # fmt: skip
)
def test_what_cannot_be_counted_is_refused_by_name(ids, tune, named):
    with pytest.raises(UserError, match=f"^{named} .*from 0 to 12"):
        fit(np.array(ids, np.int32), VOCAB, tune=np.array(tune, np.int32))
