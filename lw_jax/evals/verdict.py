"""One-word verdict of an evaluation: do the latents carry the text?

Reads the figures of `control_rows.compare` and no array, so that a report needs no JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CARRIED = 0.6  # share of the text's own gain, by answers (normalised F1) or by likelihood (recovered NLL)
WORDS = {
    "carries": "the latents carry the text",
    "partly": "the latents carry part of the text",
    "unknown": "no verdict: needs the rows text, latents, none and shuffled, and a text that helps the reader",
    "collapsed": "COLLAPSED: the right latents may help no more than another text's",
}  # best first


def judge(figures: Mapping[str, Any]) -> str:
    """Returns the key of WORDS for one reader's comparison of its rows."""
    if is_collapsed(figures):
        return "collapsed"
    shares = [figures[key] for key in ("normalised_f1", "recovered_nll") if figures.get(key) is not None]
    if "gap_nll" not in figures or not shares:
        return "unknown"
    return "carries" if max(shares) >= CARRIED else "partly"


def is_collapsed(figures: Mapping[str, Any]) -> bool:
    """Returns whether the interval of gap_nll allows that the right latents help no more than another text's."""
    if "gap_nll" not in figures:
        return False
    interval = figures.get("gap_nll_interval")
    return interval is None or interval[0] is None or not interval[0] > 0


def format_interval(interval: Sequence[float] | None) -> str:
    """Returns an interval for a terminal."""
    return f"{interval[0]:.3f}..{interval[1]:.3f}" if interval else "unknown"
