"""Verdict of an evaluation in a word and in a sentence: does the message carry the text, and by its latents?

Reads the figures of `comparison.compare` and no array, so that a report needs no JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SHARES = ("normalised_f1", "recovered_nll")  # of the text's own gain
OWN = ("own_f1", "own_nll")  # of its gain over another text's message, which gives the form of an answer too
CARRIED = 0.6  # least share, by answers or by likelihood, of SHARES and of OWN
AS_WELL = 0.9  # of the text's own gain: a message whose whole interval is above it serves as well as the text
FAILS = 0.1  # of the text's own gain: with another text's message no more of it is left
FEWEST = 8  # texts of a verdict: of fewer a bootstrap's interval may have no width at all
WORDS = {
    "carries": "the message carries the text",
    "partly": "the message carries part of the text",
    "unknown": f"no verdict: needs the rows text, latents, none and shuffled, {FEWEST} texts and a text that helps",
    "useless": "USELESS: with the message a reader may answer no better than with nothing",
    "collapsed": "COLLAPSED: the right latents may help no more than another text's",
}  # best first


def judge(figures: Mapping[str, Any]) -> str:
    """Returns the key of WORDS for one reader's comparison of its rows."""
    if has_few(figures):
        return "unknown"
    if _may_be_zero(figures, "gap_nll"):  # the right latents may help no more than another text's
        return "collapsed"
    if "gap_nll" not in figures or all(figures.get(key) is None for key in SHARES):
        return "unknown"
    if not (above := _settled(figures, SHARES)):
        return "useless"
    return "carries" if min(max(above), max(_settled(figures, OWN), default=0)) >= CARRIED else "partly"


def _settled(figures: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
    return [figures[key] for key in keys if figures.get(key) is not None and not _may_be_zero(figures, key)]


def sentence(reader: str, figures: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what an evaluation found of one reader, for people: `judge`, with the figures that it rests on.

    `figures` compare the reader's `rows`, both as eval.json has them.
    """
    key = judge(figures)
    f1 = {row: values["f1"] for row, values in rows.items() if "f1" in values}
    if has_few(figures):
        text = f"no verdict: {figures.get('texts', 0)} texts are too few, at least {FEWEST} are needed"
    elif key == "collapsed":
        both = ""
        if {"latents", "shuffled"} <= f1.keys():
            both = f" (F1 {f1['latents']:.2f}, with another text's {f1['shuffled']:.2f})"
        text = f"COLLAPSED: another text's latents may serve as well{both}: nothing shows that its own carry the text"
    elif key == "useless":
        text = f"{WORDS[key]} (F1 {f1['latents']:.2f}, with nothing {f1['none']:.2f})"
    elif key == "unknown":
        needed = "the rows text, latents, none and shuffled are needed"
        text = f"no verdict: {figures.get('normalised_f1_reason') or needed}"
    else:
        text = f"{_describe_share(figures, rows, f1)}; {_describe_control(figures, f1)}"
    return f"{reader}: {text}"


def _describe_share(figures: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]], f1: Mapping[str, float]) -> str:
    text, message = rows[figures["upper"]], rows["latents"]
    begin, of = "", "the text"
    if "fewer_positions" in figures:
        begin, of = f"from {message['positions']:.0f} positions ", f"the {text['positions']:.0f} of the text"
    known = figures.get("normalised_f1") is not None
    place, gain = (0, "gain in F1") if known else (1, "gain in likelihood")
    key = SHARES[place]
    own = next((key for key in (OWN[place], OWN[1 - place]) if figures.get(key) is not None), OWN[place])
    low, high = figures[f"{key}_interval"] or (-1.0, 1.0)
    own_low, own_high = figures.get(f"{own}_interval") or (-1.0, 1.0)
    untaught = figures["upper"] == "text" and not _fails(figures, f1)
    form = ", the form of an answer not taught" if untaught else ""
    of += f" (F1 {message['f1']:.2f}, from the text {text['f1']:.2f}{form})"
    if min(low, own_low) < AS_WELL:
        keeps = f"{begin}it keeps {figures[key]:.0%} ({low:.0%} to {high:.0%}) of the {gain} that it has from {of}"
        if figures.get(own) is None:
            more = f"; {figures[f'{own}_reason']}" if f"{own}_reason" in figures else ""
            return keeps + more + ": measure text_taught" * bool(more and untaught)
        if own_low < AS_WELL:
            share = f"{figures[own]:.0%} ({own_low:.0%} to {own_high:.0%})"
            keeps += f" and {share} of what the text gives beyond another text's message"
        return keeps + (", so whether it answers as well is not settled" if min(high, own_high) >= AS_WELL else "")
    if known:
        return f"{begin}it answers {'better than' if low > 1 else 'as well as'} from {of}"
    likely = "likelier than" if low > 1 else "as likely as"
    return f"{begin}right answers are {likely} from {of}, whose own gain in F1 is not settled"


def _describe_control(figures: Mapping[str, Any], f1: Mapping[str, float]) -> str:
    what = "with another text's message"
    if _may_be_zero(figures, "gap_f1"):
        return f"{what} answers are less likely, as they must be, but whether fewer are right is not settled"
    fails = "fails" if _fails(figures, f1) else "answers worse"
    return f"{what} it {fails} (F1 {f1['shuffled']:.2f}), as it must"


def _fails(figures: Mapping[str, Any], f1: Mapping[str, float]) -> bool:
    left, whole = f1["shuffled"] - f1["none"], f1[figures["upper"]] - f1["none"]
    return figures.get("normalised_f1") is not None and left <= FAILS * whole


def has_few(figures: Mapping[str, Any]) -> bool:
    """Returns whether the texts are too few for a verdict; without rows to compare there is no number of them."""
    return figures.get("texts", FEWEST) < FEWEST


def _may_be_zero(figures: Mapping[str, Any], key: str) -> bool:
    if key not in figures:
        return False
    interval = figures.get(f"{key}_interval")
    return interval is None or interval[0] is None or not interval[0] > 0


def format_interval(interval: Sequence[float] | None) -> str:
    return f"{interval[0]:.3f}..{interval[1]:.3f}" if interval else "unknown"
