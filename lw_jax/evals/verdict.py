"""One-word verdict of an evaluation: does the message carry the text, and by its latents?

Reads the figures of `control_rows.compare` and no array, so that a report needs no JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CARRIED = 0.6  # share of the text's own gain, by answers (normalised F1) or by likelihood (recovered NLL)
FEWEST = 8  # texts of a verdict: of fewer a bootstrap's interval may have no width at all
WORDS = {
    "carries": "the message carries the text",
    "partly": "the message carries part of the text",
    "likelier": "beside the literals the right latents make answers likelier; whether more are right is not settled",
    "unknown": f"no verdict: needs the rows text, latents, none and shuffled, {FEWEST} texts and a text that helps",
    "literals": "LITERALS ALONE: beside the literals the right latents may add nothing to another text's",
    "collapsed": "COLLAPSED: the right latents may help no more than another text's",
}  # best first


def judge(figures: Mapping[str, Any]) -> str:
    """Returns the key of WORDS for one reader's comparison of its rows."""
    if has_few(figures):
        return "unknown"
    if is_collapsed(figures):
        return "collapsed"
    if adds_nothing(figures):
        return "literals"
    if makes_likelier_alone(figures):
        return "likelier"
    shares = [figures[key] for key in ("normalised_f1", "recovered_nll") if figures.get(key) is not None]
    if not {"gap_nll", "adds_nll"} & figures.keys() or not shares:
        return "unknown"
    return "carries" if max(shares) >= CARRIED else "partly"


def has_few(figures: Mapping[str, Any]) -> bool:
    """Returns whether the texts are too few for a verdict.

    Of figures of earlier versions, which count none, the examples.
    """
    return figures.get("texts", figures.get("examples", FEWEST)) < FEWEST


def is_collapsed(figures: Mapping[str, Any]) -> bool:
    """Returns whether the interval of gap_nll allows that the right latents help no more than another text's."""
    return _may_be_zero(figures, "gap_nll")


def adds_nothing(figures: Mapping[str, Any]) -> bool:
    """Returns whether latents and literals may serve no better than the literals with another text's latents.

    The falsifier of a message with literals: the interval of NLL's gain holds zero.
    """
    return _may_be_zero(figures, "adds_nll")


def makes_likelier_alone(figures: Mapping[str, Any]) -> bool:
    """Returns whether the right latents gain NLL beside the literals, and the interval of F1's gain holds zero."""
    return not adds_nothing(figures) and _may_be_zero(figures, "adds_f1")


def _may_be_zero(figures: Mapping[str, Any], key: str) -> bool:
    if key not in figures:
        return False
    interval = figures.get(f"{key}_interval")
    return interval is None or interval[0] is None or not interval[0] > 0


def format_interval(interval: Sequence[float] | None) -> str:
    """Returns an interval for a terminal."""
    return f"{interval[0]:.3f}..{interval[1]:.3f}" if interval else "unknown"
