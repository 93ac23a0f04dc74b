"""The control table: each reader answers from text, latents, and what a collapsed wire could not tell from latents.

It knows a `Bench` (a wire's pure functions and its weights) and data, never a recipe or a checkpoint.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import config
from lw_jax.core.types import Example, Tree
from lw_jax.data.batches import PROMPT_ROWS, Encoded
from lw_jax.data.loader import eval_batches
from lw_jax.evals import answers
from lw_jax.evals.statistics import RESAMPLES, Bootstrap, Estimate
from lw_jax.evals.verdict import is_collapsed, tell_interval

Record = dict[str, Any]
Row = dict[str, Any]  # figures by name, those of INTERVALS also with "_interval": [low, high]

INTERVALS = ("em", "f1", "nll", "first_token")  # told with a bootstrap interval over examples
WIRE = ("before", "after", "channel", "task")  # what of a reader's fields stands around latents
ANSWER = ("answer_inputs", "targets", "weights")  # and what is scored


@dataclasses.dataclass(frozen=True)
class Predict:
    """Jitted functions of one trained wire; `recipes.latentwire.LatentWire` has them under the same names."""

    encode: Callable[..., jax.Array]  # (trainable, source) -> latents
    prompt_from_latents: Callable[..., Any]  # (trainable, reader's parameters, fields, latents, name) -> prompt
    prompt_from_text: Callable[..., Any]  # (reader's parameters, tokens) -> prompt
    score: Callable[..., dict[str, jax.Array]]  # (reader's parameters, prompt, fields, name) -> values [b] by name
    generate: Callable[..., jax.Array]  # (reader's parameters, prompt, name, max_new_tokens) -> ids, -1 after the stop


@dataclasses.dataclass(frozen=True)
class Bench:
    """A trained wire as evaluation uses it."""

    predict: Predict
    trainable: Tree
    frozen: Tree
    decode: Mapping[str, Callable[[Sequence[int]], str]]  # reader's name -> ids to text
    place: Callable[[Tree, str | None], Tree]  # (host batch, the reader that reads it; None: the encoder) -> devices

    def prompt(self, fields: Mapping[str, Any], name: str, *, row: str, latents: jax.Array | None) -> Any:
        """Returns a reader's prompt of one row from its placed fields; `latents` are None where the row sends text."""
        params = self.frozen[name]
        if row in PROMPT_ROWS:
            return self.predict.prompt_from_text(params, fields[row])
        wire = {key: fields[key] for key in WIRE}
        return self.predict.prompt_from_latents(self.trainable, params, wire, latents, name)

    def score(self, fields: Mapping[str, Any], name: str, prompt: Any) -> dict[str, np.ndarray]:
        """Returns values [b] of the fields' answers by name: nll, hits, first, first5, tokens."""
        answer = {key: fields[key] for key in ANSWER}
        return jax.device_get(self.predict.score(self.frozen[name], prompt, answer, name))

    def say(self, name: str, prompt: Any, *, max_new_tokens: int) -> list[str]:
        """Returns a reader's greedy answers."""
        ids = jax.device_get(self.predict.generate(self.frozen[name], prompt, name, max_new_tokens))
        return [answers.first_line(self.decode[name]([int(token) for token in row if token >= 0])) for row in ids]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Everything that the control table was made of."""

    encoded: Encoded
    indices: list[int]  # of the examples measured, in `encoded`
    latents: np.ndarray  # f32[n m z], theirs
    records: list[Record]  # one per example, reader and row: identity, prediction, scores

    def of(self, reader: str, row: str) -> list[Record]:
        """Returns one reader's records of one row, in the order of `indices`."""
        return [record for record in self.records if (record["reader"], record["row"]) == (reader, row)]


def measure(bench: Bench, encoded: Encoded, *, asked: config.Eval) -> Measured:
    """Returns what every reader answers in the rows asked for.

    Args:
        bench: the wire.
        encoded: validation examples with the prompt rows that `asked.rows` names.
        asked: which rows, how many examples, how many at once, how long an answer.
    """
    others = encoded.shuffled()
    indices: list[int] = []
    kept: list[np.ndarray] = []
    records: list[Record] = []
    for host in eval_batches(encoded, batch=asked.batch, limit=asked.examples):
        batch, valid = host.pop("index").tolist(), host.pop("valid")
        latents = {"latents": bench.predict.encode(bench.trainable, bench.place(host["source"], None))}
        latents["shuffled"] = latents["latents"]
        if "shuffled" in asked.rows:
            shuffled = others.collate(batch, rows=())["source"]
            latents["shuffled"] = bench.predict.encode(bench.trainable, bench.place(shuffled, None))
        latents["zero"] = jnp.zeros_like(latents["latents"])
        found = [index for index, real in zip(batch, valid, strict=True) if real]
        indices += found
        kept.append(np.asarray(jax.device_get(latents["latents"]), np.float32)[valid])
        for name, host_fields in host["readers"].items():
            fields = bench.place(host_fields, name)
            for row in asked.rows:
                prompt = bench.prompt(fields, name, row=row, latents=latents.get(row))
                said = bench.say(name, prompt, max_new_tokens=asked.max_new_tokens)
                scores = bench.score(fields, name, prompt)
                for position, index in enumerate(found):
                    numbers = {key: float(value[position]) for key, value in scores.items()}
                    identity = {"reader": name, "row": row, "index": index}
                    records.append(identity | judge(encoded.examples[index], said[position]) | numbers)
    return Measured(encoded, indices, np.concatenate(kept), records)


def judge(example: Example, prediction: str) -> Record:
    """Returns an answer beside its question and its scores by the references."""
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
    gold token is among the five likeliest; distinct is the share of different predictions, which a collapsed wire
    holds near 0. Those of INTERVALS have a 95 % bootstrap interval beside them.
    """
    found: dict[str, dict[str, Row]] = {}
    for (reader, row), group in _group(records).items():
        estimates = estimate(group, Bootstrap(len(group), resamples=resamples, seed=seed))
        told: Row = {key: one.value for key, one in estimates.items()}
        told |= {f"{key}_interval": estimates[key].interval() for key in INTERVALS}
        told["distinct"] = len({record["prediction"] for record in group}) / len(group)
        told |= {"examples": len(group), "tokens": sum(record["tokens"] for record in group)}
        found.setdefault(reader, {})[row] = told
    return found


def compare(records: Sequence[Record], *, seed: int, resamples: int = RESAMPLES) -> dict[str, Row]:
    """Returns {reader: figures between its rows}, each with an interval from resamples that all rows share.

    normalised_f1 = (latents - none) / (text - none), recovered_nll = (none - latents) / (none - text): None, with the
    reason under "..._reason", where text is no better than none. gap_nll = shuffled - latents, gap_f1 = latents -
    shuffled: what the right latents are worth. A figure is absent where one of its rows was not asked for.
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
                figures |= _tell_share(key, part, whole)
        if {"latents", "shuffled"} <= rows.keys():
            latents, shuffled = rows["latents"], rows["shuffled"]
            for key, gap in (("nll", shuffled["nll"] - latents["nll"]), ("f1", latents["f1"] - shuffled["f1"])):
                figures |= {f"gap_{key}": gap.value, f"gap_{key}_interval": gap.interval()}
        found[reader] = figures
    return found


def estimate(records: Sequence[Record], bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Returns the figures that are means over examples or tokens; em and f1 only of records that hold an answer."""

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
            told = {key: f"{values[key]:.3f}" for key in columns if key in values}
            told["f1 95 %"] = tell_interval(values["f1_interval"])
            lines.append(
                f"{reader:<{width}}{row:<11}" + "".join(f"{told[name]:>{size}}" for name, size in columns.items())
            )
    return "\n".join(lines)


def tell(reader: str, figures: Mapping[str, Any]) -> str:
    """Returns a reader's figures between its rows for a terminal, with the word COLLAPSED where it applies."""
    parts = []
    for key in ("normalised_f1", "recovered_nll", "gap_f1", "gap_nll"):
        if figures.get(key) is not None:
            parts.append(f"{key} {figures[key]:.3f} ({tell_interval(figures[f'{key}_interval'])})")
        elif f"{key}_reason" in figures:
            parts.append(f"{key} unknown: {figures[f'{key}_reason']}")
    if is_collapsed(figures):
        parts.append("COLLAPSED: the right latents may be worth no more than another text's")
    return f"{reader}: " + "\n    ".join(parts or ["no rows to compare"])


def _group(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Returns the records of each (reader, row), in the order of their examples, so that rows pair."""
    grouped: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        grouped.setdefault((record["reader"], record["row"]), []).append(record)
    return {key: sorted(group, key=lambda record: record["index"]) for key, group in grouped.items()}


def _tell_share(key: str, part: Estimate, whole: Estimate) -> Row:
    if not whole.value > 0:
        return {key: None, f"{key}_interval": None, f"{key}_reason": f"text is no better than none ({whole.value:.3f})"}
    share = part.over(whole)
    return {key: share.value, f"{key}_interval": share.interval()}
