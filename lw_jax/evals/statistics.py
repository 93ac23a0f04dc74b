"""Percentile bootstrap intervals over texts; the estimates of one `Bootstrap` share their resamples."""

import dataclasses
import math
from collections.abc import Hashable, Sequence

import numpy as np

LEVEL = 0.95  # of every interval
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and its value in each resample; differences and quotients pair resample by resample."""

    value: float
    resampled: np.ndarray  # f64[r]

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value - other.value, self.resampled - other.resampled)

    def over(self, other: "Estimate") -> "Estimate":
        """Returns the quotient; NaN, reported as null, where the divisor is not above 0."""
        value = self.value / other.value if other.value > 0 else math.nan
        above = other.resampled > 0
        return Estimate(value, np.where(above, self.resampled / np.where(above, other.resampled, 1.0), np.nan))

    def interval(self) -> list[float] | None:
        """Returns [low, high]; None where too many resamples are undefined for a bound."""
        cut = int(len(self.resampled) * (1 - LEVEL) / 2)
        undefined = np.isnan(self.resampled)
        # An undefined resample may stand for any value: it counts against both ends.
        low = np.sort(np.where(undefined, -np.inf, self.resampled))[cut]
        high = np.sort(np.where(undefined, np.inf, self.resampled))[-1 - cut]
        return [float(low), float(high)] if np.isfinite([low, high]).all() else None

    def named(self, key: str) -> dict[str, float | list[float] | None]:
        """Returns the figure and its interval as a table's row has them."""
        return {key: self.value, f"{key}_interval": self.interval()}


class Bootstrap:
    """Resamples of examples by their texts; the same seed draws the same ones.

    A text is drawn with all of its questions, since their answers stand or fall together. Questions of a single text
    are drawn one by one: an interval is then that of further questions of this text. One example has no interval.
    """

    def __init__(self, texts: Sequence[Hashable], *, seed: int):
        """Draws the resamples; `texts` names each example's text."""
        number = {text: position for position, text in enumerate(dict.fromkeys(texts))}
        groups = [number[text] for text in texts] if len(number) > 1 else list(range(len(texts)))
        drawn = max(groups) + 1
        # How often each resample drew each text: drawing n indices with replacement is this multinomial.
        counts = np.random.default_rng(seed).multinomial(drawn, np.full(drawn, 1 / drawn), size=RESAMPLES)
        self.counts = counts[:, groups].astype(np.float64)  # [resamples, examples]
        if drawn == 1:
            self.counts[:] = np.nan  # all resamples of one example are it: nothing is known of others

    def mean(self, values: np.ndarray) -> Estimate:
        """Returns the mean of one value per example [n]."""
        return self.ratio(values, np.ones(len(values)))

    def ratio(self, values: np.ndarray, weights: np.ndarray) -> Estimate:
        """Returns sum(values) / sum(weights), both [n], as of a negative log-likelihood over tokens."""
        values, weights = np.asarray(values, np.float64), np.asarray(weights, np.float64)
        return Estimate(float(values.sum() / weights.sum()), self.counts @ values / (self.counts @ weights))
