"""Control table: each reader's answers from text, from latents and from controls that expose a collapsed wire.

Depends on a `Bench` (a wire's functions and weights) and on data, on no recipe and no checkpoint.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import config, processes
from lw_jax.core.types import Example, Tree
from lw_jax.data.batches import PROMPT_ROWS, Encoded
from lw_jax.data.loader import eval_batches
from lw_jax.evals import answers
from lw_jax.evals.statistics import RESAMPLES, Bootstrap, Estimate
from lw_jax.evals.verdict import WORDS, format_interval, is_collapsed
from lw_jax.evals.wire_functions import WireFunctions

Record = dict[str, Any]
Row = dict[str, Any]  # figures by name, those of INTERVALS also with "_interval": [low, high]

INTERVALS = ("em", "f1", "nll", "first_token")  # reported with a bootstrap interval over examples
WIRE = ("before", "after", "channel", "task")  # a reader's fields around its latents
ANSWER = ("answer_inputs", "targets", "weights")  # its scored fields


@dataclasses.dataclass(frozen=True)
class Bench:
    """A trained wire with its weights, detokenizers and device placement."""

    functions: WireFunctions
    trainable: Tree
    frozen: Tree
    decode: Mapping[str, Callable[[Sequence[int]], str]]  # reader's name -> ids to text
    # (this process's rows on the host, reader's name or None for the encoder) -> device batch, and back
    place: Callable[[Tree, str | None], Tree]
    fetch: Callable[[Tree, str | None], Tree] = lambda tree, name: jax.device_get(tree)

    def prompt(self, fields: Mapping[str, Any], name: str, *, row: str, latents: jax.Array | None) -> Any:
        """Returns a reader's prompt for one row from its placed fields; `latents` are None for text rows."""
        params = self.frozen[name]
        if row in PROMPT_ROWS:
            return self.functions.prompt_from_text(params, fields[row])
        assert latents is not None, row
        wire = {key: fields[key] for key in WIRE}
        return self.functions.prompt_from_latents(self.trainable, params, wire, latents, name)

    def score(self, fields: Mapping[str, Any], name: str, prompt: Any) -> dict[str, np.ndarray]:
        """Returns nll, hits, first, first5 and tokens [b] of the reference answers of this process's rows."""
        answer = {key: fields[key] for key in ANSWER}
        return self.fetch(self.functions.score(self.frozen[name], prompt, answer, name), name)

    def answer(self, name: str, prompt: Any, *, max_new_tokens: int) -> list[str]:
        """Returns a reader's greedy answers to this process's rows."""
        ids = self.fetch(self.functions.generate(self.frozen[name], prompt, name, max_new_tokens), name)
        return [answers.first_line(self.decode[name]([int(token) for token in row if token >= 0])) for row in ids]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Records of the control table, with their examples and latents."""

    encoded: Encoded
    indices: list[int]  # of the measured examples, in `encoded`
    latents: np.ndarray  # f32[n m z], of the same examples
    records: list[Record]  # one per example, reader and row: identity, prediction, scores

    def of(self, reader: str, row: str) -> list[Record]:
        """Returns one reader's records of one row, in the order of `indices`."""
        return [record for record in self.records if (record["reader"], record["row"]) == (reader, row)]


def measure(bench: Bench, encoded: Encoded, *, options: config.Eval) -> Measured:
    """Returns every reader's answers and scores in the configured rows.

    Args:
        bench: the wire.
        encoded: validation examples with the prompt rows that `options.rows` names.
        options: rows, number of examples, batch, answer length.
    """
    others = encoded.shuffled()
    indices: list[list[int]] = []
    collected: list[np.ndarray] = []
    records: list[list[Record]] = []  # of each batch, reader and row
    for host in eval_batches(encoded, options.batch, options.examples, share=processes.share()):
        batch, valid = host.pop("index").tolist(), host.pop("valid")
        latents = {"latents": bench.functions.encode(bench.trainable, bench.place(host["source"], None))}
        latents["shuffled"] = latents["latents"]
        if "shuffled" in options.rows:
            shuffled = others.collate(batch, rows=())["source"]
            latents["shuffled"] = bench.functions.encode(bench.trainable, bench.place(shuffled, None))
        latents["zero"] = jnp.zeros_like(latents["latents"])
        examples = [index for index, real in zip(batch, valid, strict=True) if real]
        indices.append(examples)
        collected.append(np.asarray(bench.fetch(latents["latents"], None), np.float32)[valid])
        for name, host_fields in host["readers"].items():
            fields = bench.place(host_fields, name)
            for row in options.rows:
                prompt = bench.prompt(fields, name, row=row, latents=latents.get(row))
                predictions = bench.answer(name, prompt, max_new_tokens=options.max_new_tokens)
                scores = bench.score(fields, name, prompt)
                found: list[Record] = []
                for position, index in enumerate(examples):
                    numbers = {key: float(value[position]) for key, value in scores.items()}
                    identity = {"reader": name, "row": row, "index": index}
                    found.append(identity | judge(encoded.examples[index], predictions[position]) | numbers)
                records.append(found)
    return _gather(encoded, indices, collected, records)


def _gather(
    encoded: Encoded, indices: list[list[int]], latents: list[np.ndarray], records: list[list[Record]]
) -> Measured:
    """Returns what all processes measured, in the order of one process: each has given its rows of every batch."""
    counts = processes.gather([len(batch) for batch in indices])
    own = zip(processes.gather_rows(np.concatenate(latents)), counts, strict=True)
    parts = [np.split(rows, np.cumsum(sizes)[:-1]) for rows, sizes in own]
    whole = np.concatenate([part for batch in zip(*parts, strict=True) for part in batch])
    return Measured(encoded, merge(indices), whole, merge(records))


def merge(groups: list[list[Any]]) -> list[Any]:
    """Returns the entries of all processes' groups: group by group, in each that of process 0 first."""
    return [entry for group in zip(*processes.gather(groups), strict=True) for part in group for entry in part]


def judge(example: Example, prediction: str) -> Record:
    """Returns a prediction with its question, references, exact match and F1."""
    return {
        "id": example.id,
        "question": example.question,
        "answers": list(example.answers),
        "prediction": prediction,
        "em": answers.exact_match(prediction, example.answers),
        "f1": answers.f1(prediction, example.answers),
    }


def summarise(records: Sequence[Record], *, seed: int, resamples: int = RESAMPLES) -> dict[str, dict[str, Row]]:
    """Returns {reader: {row: figures}}: em, f1, nll, accuracy, first_token, first_5, distinct, examples, tokens.

    Rates lie in 0..1; nll is in nats per answer token (EOS included), accuracy is teacher-forced; first_5: the first
    gold token is among the five likeliest; distinct is the share of different predictions, near 0 for a collapsed
    wire. INTERVALS have a 95 % bootstrap interval each.
    """
    found: dict[str, dict[str, Row]] = {}
    for (reader, row), group in _group(records).items():
        estimates = estimate(group, Bootstrap(len(group), resamples=resamples, seed=seed))
        figures: Row = {key: one.value for key, one in estimates.items()}
        figures |= {f"{key}_interval": estimates[key].interval() for key in INTERVALS}
        figures["distinct"] = len({record["prediction"] for record in group}) / len(group)
        figures |= {"examples": len(group), "tokens": sum(record["tokens"] for record in group)}
        found.setdefault(reader, {})[row] = figures
    return found


def compare(records: Sequence[Record], *, seed: int, resamples: int = RESAMPLES) -> dict[str, Row]:
    """Returns {reader: comparisons of its rows}, each with an interval from resamples that all rows share.

    normalised_f1 = (latents - none) / (text - none), recovered_nll = (none - latents) / (none - text): None, with the
    reason under "..._reason", where text is no better than none. gap_nll = shuffled - latents, gap_f1 = latents -
    shuffled: the gain of the right latents. A figure is absent where one of its rows was not measured.
    """
    grouped = _group(records)
    found: dict[str, Row] = {}
    for reader in dict.fromkeys(reader for reader, _ in grouped):
        own = {row: group for (name, row), group in grouped.items() if name == reader}
        bootstrap = Bootstrap(len(next(iter(own.values()))), resamples=resamples, seed=seed)
        rows = {row: estimate(group, bootstrap) for row, group in own.items()}
        figures: Row = {}
        if {"text", "latents", "none"} <= rows.keys():
            text, latents, none = rows["text"], rows["latents"], rows["none"]
            shares = {
                "normalised_f1": (latents["f1"] - none["f1"], text["f1"] - none["f1"]),
                "recovered_nll": (none["nll"] - latents["nll"], none["nll"] - text["nll"]),
            }
            for key, (part, whole) in shares.items():
                figures |= _share(key, part, whole)
        if {"latents", "shuffled"} <= rows.keys():
            latents, shuffled = rows["latents"], rows["shuffled"]
            for key, gap in (("nll", shuffled["nll"] - latents["nll"]), ("f1", latents["f1"] - shuffled["f1"])):
                figures |= {f"gap_{key}": gap.value, f"gap_{key}_interval": gap.interval()}
        found[reader] = figures
    return found


def estimate(records: Sequence[Record], bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Returns the means over examples or tokens; em and f1 only for records with a prediction."""

    def column(key: str) -> np.ndarray:
        return np.array([record[key] for record in records])

    tokens = column("tokens")
    answered = ("em", "f1") if "prediction" in records[0] else ()
    return {key: bootstrap.mean(column(key)) for key in answered} | {
        "nll": bootstrap.ratio(column("nll"), tokens),
        "accuracy": bootstrap.ratio(column("hits"), tokens),
        "first_token": bootstrap.mean(column("first")),
        "first_5": bootstrap.mean(column("first5")),
    }


def table(rows: Mapping[str, Mapping[str, Row]]) -> str:
    """Returns the control table for a terminal."""
    width = max(map(len, ("reader", *rows))) + 2
    columns = {"em": 8, "f1": 8, "f1 95 %": 16, "nll": 9, "accuracy": 10, "first_token": 13, "first_5": 9}
    columns["distinct"] = 10
    lines = [f"{'reader':<{width}}{'row':<11}" + "".join(f"{name:>{size}}" for name, size in columns.items())]
    for reader, found in rows.items():
        for row, values in found.items():
            cells = {key: f"{values[key]:.3f}" for key in columns if key in values}
            cells["f1 95 %"] = format_interval(values["f1_interval"])
            lines.append(
                f"{reader:<{width}}{row:<11}" + "".join(f"{cells[name]:>{size}}" for name, size in columns.items())
            )
    return "\n".join(lines)


def format_comparison(reader: str, figures: Mapping[str, Any]) -> str:
    """Returns a reader's comparison of its rows for a terminal, with COLLAPSED where it applies."""
    parts = []
    for key in ("normalised_f1", "recovered_nll", "gap_f1", "gap_nll"):
        if figures.get(key) is not None:
            parts.append(f"{key} {figures[key]:.3f} ({format_interval(figures[f'{key}_interval'])})")
        elif f"{key}_reason" in figures:
            parts.append(f"{key} unknown: {figures[f'{key}_reason']}")
    if is_collapsed(figures):
        parts.append(WORDS["collapsed"])
    return f"{reader}: " + "\n    ".join(parts or ["no rows to compare"])


def _group(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Returns the records of each (reader, row), sorted by example so that rows pair."""
    grouped: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        grouped.setdefault((record["reader"], record["row"]), []).append(record)
    return {key: sorted(group, key=lambda record: record["index"]) for key, group in grouped.items()}


def _share(key: str, part: Estimate, whole: Estimate) -> Row:
    if not whole.value > 0:
        return {key: None, f"{key}_interval": None, f"{key}_reason": f"text is no better than none ({whole.value:.3f})"}
    share = part.over(whole)
    return {key: share.value, f"{key}_interval": share.interval()}
