"""Figures of the control table: means with intervals, and comparisons of its rows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lw_jax.core.eval_rows import OF_CACHE, ROWS
from lw_jax.evals.statistics import Bootstrap, Estimate
from lw_jax.evals.verdict import OWN, SHARES, format_interval

Record = dict[str, Any]
Row = dict[str, Any]  # figures by name, those of INTERVALS also with "_interval": [low, high]

INTERVALS = ("em", "f1", "nll", "first_token")  # reported with a bootstrap interval over texts


UPPER = ("text_taught", "text")  # rows that a message is measured against: the first that was measured
FOLLOWED = ("swapped_taught", "swapped_text")  # the same of a text with another answer in it


def summarise(records: Sequence[Record], *, seed: int) -> dict[str, dict[str, Row]]:
    """Returns {reader: {row: figures}}: positions, em, f1, nll, accuracy, first_token, first_5, distinct, and counts.

    positions: mean positions of the reader that hold the context. Rates lie in 0..1; nll is in nats per answer token
    (EOS included), accuracy is teacher-forced; first_5: the first gold token is among the five likeliest; distinct is
    the share of different predictions, near 0 for a collapsed wire; follows, of texts with another answer in them: the
    share of answers that are the new one. INTERVALS have a 95 % bootstrap interval each.
    """
    by_reader: dict[str, dict[str, Row]] = {}
    resample = _resampler(seed)
    for (reader, row), group in _group(records).items():
        bootstrap = resample(_texts(group))
        estimates = estimate(group, bootstrap)
        figures: Row = {"positions": _mean(group, "positions")} | {key: mean.value for key, mean in estimates.items()}
        figures |= {f"{key}_interval": estimates[key].interval() for key in INTERVALS}
        if "follows" in group[0]:
            figures |= bootstrap.mean(_column(group, "follows")).named("follows")
        figures["distinct"] = len({record["prediction"] for record in group}) / len(group)
        figures |= {
            "examples": len(group),
            "texts": _count_texts(group),
            "tokens": sum(record["tokens"] for record in group),
        }
        by_reader.setdefault(reader, {})[row] = figures
    return by_reader


def compare(records: Sequence[Record], *, seed: int) -> dict[str, Row]:
    """Returns {reader: comparisons of its rows}, each with an interval from resamples that all rows share.

    The text is the row "upper", the first of UPPER that was measured; the message the row "latents".
    normalised_f1 = (message - none) / (text - none), recovered_nll = (none - message) / (none - text): None, with the
    reason under "..._reason", where the interval of the denominator reaches 0; of a cache's rows with their names
    behind, as normalised_f1_half. fewer_positions: the text's reader
    positions / the message's. gap_nll = shuffled - latents, gap_f1 = latents - shuffled: the gain of the right latents;
    own_nll and own_f1 are these over the text's gain, likewise.
    follows: of the questions where the reader follows a text with another answer in it, the share where it follows that
    text's message. A figure is absent where one of its rows was not measured. examples: compared in each row, without
    follows; texts: those that they are about.
    """
    grouped = _group(records)
    comparisons: dict[str, Row] = {}
    resample = _resampler(seed)
    for reader in dict.fromkeys(reader for reader, _ in grouped):
        groups = {row: group for (name, row), group in grouped.items() if name == reader}
        plain = {row: group for row, group in groups.items() if not ROWS[row].swapped}
        figures: Row = {}
        if plain:
            first = next(iter(plain.values()))
            bootstrap = resample(_texts(first))
            figures = _compare_plain(plain, {row: estimate(group, bootstrap) for row, group in plain.items()})
            figures |= {"examples": len(first), "texts": _count_texts(first)} if figures else {}
        text = next((groups[row] for row in FOLLOWED if row in groups), None)
        if text and "swapped" in groups:
            figures |= _follow(groups["swapped"], text, resample(_texts(text)))
        comparisons[reader] = figures
    return comparisons


def _compare_plain(groups: Mapping[str, Sequence[Record]], rows: Mapping[str, Mapping[str, Estimate]]) -> Row:
    figures: Row = {}
    upper = next((row for row in UPPER if row in rows), None)
    if upper and "none" in rows and (messages := [row for row in ("latents", *OF_CACHE) if row in rows]):
        text, none = rows[upper], rows["none"]
        figures["upper"] = upper
        for row in messages:
            message, name = rows[row], "" if row == "latents" else f"_{row}"
            shares = {
                f"normalised_f1{name}": (message["f1"] - none["f1"], text["f1"] - none["f1"]),
                f"recovered_nll{name}": (none["nll"] - message["nll"], none["nll"] - text["nll"]),
            }
            for key, (part, whole) in shares.items():
                figures |= _share(key, part, whole, f"{upper} may be no better than none")
    if upper and "latents" in rows and (kept := _mean(groups["latents"], "positions")):
        figures["fewer_positions"] = _mean(groups[upper], "positions") / kept
    if {"latents", "shuffled"} <= rows.keys():
        right, other = rows["latents"], rows["shuffled"]
        gap_nll, gap_f1 = other["nll"] - right["nll"], right["f1"] - other["f1"]
        figures |= gap_nll.named("gap_nll") | gap_f1.named("gap_f1")
        if upper:
            reason = f"{upper} may be no better than shuffled"
            figures |= _share("own_nll", gap_nll, other["nll"] - rows[upper]["nll"], reason)
            figures |= _share("own_f1", gap_f1, rows[upper]["f1"] - other["f1"], reason)
    return figures


def _follow(message: Sequence[Record], text: Sequence[Record], bootstrap: Bootstrap) -> Row:
    """Returns the share of followed messages among followed texts; both have the same examples."""
    followed = _column(text, "follows")
    if not followed.any():
        return {"follows": None, "follows_interval": None, "follows_reason": "the reader follows no changed text"}
    both = bootstrap.mean(followed * _column(message, "follows"))
    return both.over(bootstrap.mean(followed)).named("follows")


def _resampler(seed: int) -> Callable[[tuple[int, ...]], Bootstrap]:
    """Returns what draws the resamples of texts; rows of the same texts share them: of 10,000 they take seconds."""
    return functools.cache(functools.partial(Bootstrap, seed=seed))


def _texts(records: Sequence[Record]) -> tuple[int, ...]:
    return tuple(record["text"] for record in records)


def _count_texts(records: Sequence[Record]) -> int:
    return len(set(_texts(records)))


def _column(records: Sequence[Record], key: str) -> np.ndarray:
    return np.array([record[key] for record in records], np.float64)


def _mean(records: Sequence[Record], key: str) -> float:
    return float(_column(records, key).mean())


def estimate(records: Sequence[Record], bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Returns the means over examples or tokens; em and f1 only for records with a prediction."""
    tokens = _column(records, "tokens")
    answered = ("em", "f1") if "prediction" in records[0] else ()
    return {key: bootstrap.mean(_column(records, key)) for key in answered} | {
        "nll": bootstrap.ratio(_column(records, "nll"), tokens),
        "accuracy": bootstrap.ratio(_column(records, "hits"), tokens),
        "first_token": bootstrap.mean(_column(records, "first")),
        "first_5": bootstrap.mean(_column(records, "first5")),
    }


def table(rows: Mapping[str, Mapping[str, Row]]) -> str:
    width = max(map(len, ("reader", *rows))) + 2
    second = max(9, *(len(row) for by_row in rows.values() for row in by_row)) + 2
    columns = {"positions": 9, "ms": 11, "em": 7, "f1": 7, "f1 95 %": 15, "nll": 8, "accuracy": 9, "first_token": 12}
    columns |= {"first_5": 8, "distinct": 9}
    lines = [f"{'reader':<{width}}{'row':<{second}}" + "".join(f"{name:>{size}}" for name, size in columns.items())]
    for reader, by_row in rows.items():
        for row, values in by_row.items():
            cells = {key: f"{values[key]:.3f}" for key in columns if key in values}
            cells["positions"] = f"{values['positions']:.1f}"
            cells["ms"] = f"{1000 * values['first_token_seconds']:,.1f}" if "first_token_seconds" in values else ""
            cells["f1 95 %"] = format_interval(values["f1_interval"])
            lines.append(
                f"{reader:<{width}}{row:<{second}}"
                + "".join(f"{cells[name]:>{size}}" for name, size in columns.items())
            )
    return "\n".join(lines)


def format_comparison(reader: str, figures: Mapping[str, Any]) -> str:
    parts = []
    timed = f"; the message has one of {figures['timed_ratio']} positions" if "timed_ratio" in figures else ""
    if "fewer_positions" in figures:
        parts.append(f"fewer_positions {figures['fewer_positions']:.2f}x")
    if "write_seconds" in figures:
        seconds = f"written in {figures['write_seconds']:.2f} s, its bytes opened in {figures['open_seconds']:.3f} s"
        parts.append(f"a text of {figures['timed_tokens']} tokens {seconds}")
    if "bytes_a_token" in figures:
        parts.append(f"{figures['bytes_a_token']:.1f} bytes a token of the text")
    if "faster" in figures:
        parts.append(
            f"first token in {1 / figures['faster']:.2f}x the time of a text of {figures['timed_tokens']} tokens{timed}"
        )
    shares = [f"{key}{row}" for row in ("", *(f"_{row}" for row in OF_CACHE)) for key in SHARES]
    shares += OWN
    for key in (*shares, "gap_f1", "gap_nll", "follows"):
        against = f" of {figures['upper']}" if key in shares and "upper" in figures else ""
        if figures.get(key) is not None:
            parts.append(f"{key}{against} {figures[key]:.3f} ({format_interval(figures[f'{key}_interval'])})")
        elif f"{key}_reason" in figures:
            parts.append(f"{key} unknown: {figures[f'{key}_reason']}")
    return f"{reader}: " + "\n    ".join(parts or ["no rows to compare"])


def _group(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    grouped: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        grouped.setdefault((record["reader"], record["row"]), []).append(record)
    return {key: sorted(group, key=lambda record: record["index"]) for key, group in grouped.items()}


def _share(key: str, part: Estimate, whole: Estimate, rule: str) -> Row:
    low = (whole.interval() or [-np.inf])[0]
    if not (whole.value > 0 and low > 0):
        reason = f"{rule} ({whole.value:.3f}, {format_interval(whole.interval())})"
        return {key: None, f"{key}_interval": None, f"{key}_reason": reason}
    return part.over(whole).named(key)
