"""Unigram and bigram models of token ids: baselines for a language model on the same held-out text.

Unigram: add-one. Bigram: interpolated Kneser-Ney (Chen and Goodman 1999), the best of three that were tried on this
project's texts: p(t|h) = (c(h t) - D [c(h t) > 0] + D k(h) q(t)) / c(h). c counts pairs, k(h) the different tokens seen
after h, q(t) is the share of different histories that t was seen after (add-one), and D the best of a grid on text
outside the counts.
"""

import dataclasses

import numpy as np

from lw_jax.core.errors import UserError

DISCOUNTS = np.linspace(0.01, 1.0, 100)


@dataclasses.dataclass(frozen=True)
class NGrams:
    """Both models; memory grows with the number of different pairs, not with the vocabulary squared."""

    unigram: np.ndarray  # f64[v], probabilities
    follows: np.ndarray  # f64[v], probabilities: q
    pairs: np.ndarray  # i64[n], history * v + token, increasing
    counts: np.ndarray  # i64[n], how often each pair was seen
    totals: np.ndarray  # i64[v], pairs of each history
    kinds: np.ndarray  # i64[v], different pairs with each history
    discount: float = 0.0

    def probability(self, histories: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the bigram's probability f64 of each token after its history; q after an unseen one."""
        counted, discounted = _parts(self, histories, tokens)
        return counted + self.discount * discounted

    def nll(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the negative log-likelihood of the L targets of each window of i32[b L+1]: f32[b], in nats."""
        histories, tokens = ids[:, :-1], ids[:, 1:]
        both = {"unigram": self.unigram[tokens], "bigram": self.probability(histories, tokens)}
        return {name: -np.log(values).sum(axis=1).astype(np.float32) for name, values in both.items()}


def fit(ids: np.ndarray, vocab: int, *, tune: np.ndarray) -> NGrams:
    """Returns the models of ids i32[n]; `tune` i32[m], disjoint from them, chooses the discount.

    Raises UserError where either has less than one pair, or ids beyond the vocabulary.
    """
    for name, values in (("ids", ids), ("tune", tune)):
        if values.ndim != 1 or len(values) < 2 or not 0 <= values.min() <= values.max() < vocab:
            raise UserError(f"{name} {values.shape}: a row of two or more ids from 0 to {vocab - 1} is needed")
    pairs, counts = np.unique(ids[:-1].astype(np.int64) * vocab + ids[1:], return_counts=True)
    model = NGrams(
        unigram=(np.bincount(ids, minlength=vocab) + 1) / (len(ids) + vocab),
        follows=(np.bincount(pairs % vocab, minlength=vocab) + 1) / (len(pairs) + vocab),
        pairs=pairs,
        counts=counts,
        totals=np.bincount(ids[:-1], minlength=vocab),
        kinds=np.bincount(pairs // vocab, minlength=vocab),
    )
    counted, discounted = _parts(model, tune[:-1], tune[1:])
    losses = [-np.log(counted + discount * discounted).sum() for discount in DISCOUNTS]
    return dataclasses.replace(model, discount=float(DISCOUNTS[np.argmin(losses)]))


def _parts(model: NGrams, histories: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns f64 `counted` and `discounted`: the probability is the first plus the discount times the second."""
    codes = histories.astype(np.int64) * len(model.follows) + tokens
    indices = np.minimum(np.searchsorted(model.pairs, codes), len(model.pairs) - 1)
    seen = np.where(model.pairs[indices] == codes, model.counts[indices], 0)
    total, back = model.totals[histories], model.follows[tokens]
    counted = np.where(total > 0, seen / np.maximum(total, 1), back)
    return counted, (model.kinds[histories] * back - (seen > 0)) / np.maximum(total, 1)
