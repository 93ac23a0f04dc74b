"""The control table: each reader answers from text, latents, and what a collapsed wire could not tell from latents.

It knows a `Predict` (pure functions over arrays) and data, never a recipe or a checkpoint.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import config
from lw_jax.core.types import Example, Tree
from lw_jax.data.batches import PROMPT_ROWS, Encoded
from lw_jax.data.loader import eval_batches
from lw_jax.evals import answers

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Predict:
    """Jitted functions of one trained wire; `recipes.latentwire.LatentWire` has them under the same names."""

    encode: Callable[..., jax.Array]  # (trainable, source) -> latents
    prompt_from_latents: Callable[..., Any]  # (trainable, reader's parameters, fields, latents, name) -> prompt
    prompt_from_text: Callable[..., Any]  # (reader's parameters, tokens) -> prompt
    score: Callable[..., dict[str, jax.Array]]  # (reader's parameters, prompt, fields, name) -> values [b] by name
    generate: Callable[..., jax.Array]  # (reader's parameters, prompt, name, max_new_tokens) -> ids, -1 after the stop


def other_examples(encoded: Encoded) -> list[int]:
    """Returns, for each example, the next one (cyclically) with another context: whose latents the shuffled row sends.

    Where all contexts are the same there is no such example and the row would equal "latents": itself is returned.
    """
    contexts = [example.context for example in encoded.examples]
    count = len(contexts)
    others = []
    for index, context in enumerate(contexts):
        steps = (step for step in range(1, count) if contexts[(index + step) % count] != context)
        others.append((index + next(steps, 0)) % count)
    return others


def measure(
    predict: Predict,
    weights: tuple[Tree, Tree],
    encoded: Encoded,
    *,
    asked: config.Eval,
    decode: Mapping[str, Callable[[Sequence[int]], str]],
    place: Callable[[Tree, str | None], Tree],
) -> Iterator[Record]:
    """Yields one record per example, reader and row: identity, prediction, scores.

    Args:
        predict: the wire's functions.
        weights: (trainable, frozen).
        encoded: validation examples with the prompt rows that `asked.rows` names.
        asked: which rows, how many examples, how many at once, how long an answer.
        decode: reader's name -> ids to text.
        place: (host batch, the reader that reads it; None: the encoder) -> devices.
    """
    trainable, frozen = weights
    others = other_examples(encoded)
    for host in eval_batches(encoded, batch=asked.batch, limit=asked.examples):
        indices, valid = host.pop("index").tolist(), host.pop("valid")
        source = place(host["source"], None)
        shuffled = place(encoded.source.collate([others[index] for index in indices]), None)
        latents = {"latents": predict.encode(trainable, source)}
        latents["shuffled"] = predict.encode(trainable, shuffled) if "shuffled" in asked.rows else latents["latents"]
        latents["zero"] = jnp.zeros_like(latents["latents"])
        for name, host_fields in host["readers"].items():
            fields, params = place(host_fields, name), frozen[name]
            answer = {key: fields[key] for key in ("answer_inputs", "targets", "weights")}
            edges = {key: fields[key] for key in ("before", "after")}
            for row in asked.rows:
                if row in PROMPT_ROWS:
                    prompt = predict.prompt_from_text(params, fields[row])
                else:
                    prompt = predict.prompt_from_latents(trainable, params, edges, latents[row], name)
                scores = jax.device_get(predict.score(params, prompt, answer, name))
                ids = jax.device_get(predict.generate(params, prompt, name, asked.max_new_tokens))
                for position in np.flatnonzero(valid):
                    said = decode[name]([int(token) for token in ids[position] if token >= 0])
                    numbers = {key: float(value[position]) for key, value in scores.items()}
                    yield {"reader": name, "row": row} | _judge(encoded.examples[indices[position]], said) | numbers


def summarise(records: Sequence[Record]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {reader: {row: {"em", "f1", "nll", "accuracy", "first_token", "distinct", "examples", "tokens"}}}.

    Rates lie in 0..1; nll is in nats per answer token (EOS included), accuracy is teacher-forced; distinct is the
    share of different predictions, which a collapsed wire holds near 0.
    """
    grouped: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        grouped.setdefault(record["reader"], {}).setdefault(record["row"], []).append(record)
    return {reader: {row: _mean(found) for row, found in rows.items()} for reader, rows in grouped.items()}


def table(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Returns the control table for a terminal."""
    columns = ("em", "f1", "nll", "accuracy", "first_token", "distinct")
    lines = [f"{'reader':<10}{'row':<11}" + "".join(f"{column:>13}" for column in columns)]
    for reader, found in rows.items():
        for row, values in found.items():
            lines.append(f"{reader:<10}{row:<11}" + "".join(f"{values[column]:>13.3f}" for column in columns))
    return "\n".join(lines)


def _mean(records: Sequence[Record]) -> dict[str, float]:
    tokens = sum(record["tokens"] for record in records)
    count = len(records)
    return {
        "em": sum(record["em"] for record in records) / count,
        "f1": sum(record["f1"] for record in records) / count,
        "nll": sum(record["nll"] for record in records) / tokens,
        "accuracy": sum(record["hits"] for record in records) / tokens,
        "first_token": sum(record["first"] for record in records) / count,
        "distinct": len({record["prediction"] for record in records}) / count,
        "examples": count,
        "tokens": tokens,
    }


def _judge(example: Example, said: str) -> Record:
    prediction = answers.first_line(said)
    return {
        "id": example.id,
        "question": example.question,
        "answers": list(example.answers),
        "prediction": prediction,
        "em": answers.exact_match(prediction, example.answers),
        "f1": answers.f1(prediction, example.answers),
    }
