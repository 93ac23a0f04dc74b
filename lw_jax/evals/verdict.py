"""What an evaluation says in a word: do the latents carry the text?

It knows the figures that `rows.compare` finds and no array, so that a report needs no JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CARRIED = 0.6  # of what the text is worth to the reader, by answers (normalised F1) or by likelihood (recovered NLL)
WORDS = {
    "carries": "the latents carry the text",
    "partly": "the latents carry part of the text",
    "unknown": "no verdict: it takes the rows text, latents, none and shuffled, and a text that helps the reader",
    "collapsed": "COLLAPSED: the right latents may be worth no more than another text's",
}  # the best first


def judge(figures: Mapping[str, Any]) -> str:
    """Returns the key of WORDS that one reader's figures between its rows deserve."""
    if is_collapsed(figures):
        return "collapsed"
    shares = [figures[key] for key in ("normalised_f1", "recovered_nll") if figures.get(key) is not None]
    if "gap_nll" not in figures or not shares:
        return "unknown"
    return "carries" if max(shares) >= CARRIED else "partly"


def is_collapsed(figures: Mapping[str, Any]) -> bool:
    """Tells whether the right latents may be worth no more than another text's, by the interval of gap_nll."""
    if "gap_nll" not in figures:
        return False
    interval = figures.get("gap_nll_interval")
    return interval is None or interval[0] is None or not interval[0] > 0


def tell_interval(interval: Sequence[float] | None) -> str:
    """Returns an interval for a terminal."""
    return f"{interval[0]:.3f}..{interval[1]:.3f}" if interval else "unknown"
