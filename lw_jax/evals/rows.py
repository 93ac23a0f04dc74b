"""The control table: each reader answers from text, latents, and what a collapsed wire could not tell from latents.

It knows a `Predict` (pure functions over arrays) and data, never a recipe or a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.types import Tree
from lw_jax.data.batches import PROMPT_ROWS, Encoded
from lw_jax.data.loader import eval_batches
from lw_jax.evals import answers

WIRE_ROWS = ("latents", "shuffled", "zero")
ROWS = ("text", *WIRE_ROWS, "none", "truncated")
Record = dict[str, Any]


class Predict(Protocol):
    """Jitted functions of one trained wire; `recipes.latentwire.LatentWire` has them."""

    @property
    def encode(self) -> Callable[..., jax.Array]: ...
    @property
    def prompt_from_latents(self) -> Callable[..., Any]: ...
    @property
    def prompt_from_text(self) -> Callable[..., Any]: ...
    @property
    def score(self) -> Callable[..., dict[str, jax.Array]]: ...
    @property
    def generate(self) -> Callable[..., jax.Array]: ...


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
    rows: Sequence[str],
    decode: Mapping[str, Callable[[Sequence[int]], str]],
    place: Callable[[Tree], Tree],
    batch: int,
    limit: int,
    max_new_tokens: int,
) -> Iterator[Record]:
    """Yields one record per example, reader and row: identity, prediction, scores.

    Args:
        weights: (trainable, frozen).
        rows: of `ROWS`.
        decode: reader's name -> ids to text.
        place: host batch -> devices.
    """
    trainable, frozen = weights
    others = other_examples(encoded)
    for host in eval_batches(encoded, batch=batch, limit=limit):
        indices, valid = host.pop("index").tolist(), host.pop("valid")
        source = place(host["source"])
        shuffled = place(encoded.source.collate([others[index] for index in indices]))
        latents = {"latents": predict.encode(trainable, source)}
        latents["shuffled"] = predict.encode(trainable, shuffled) if "shuffled" in rows else latents["latents"]
        latents["zero"] = jnp.zeros_like(latents["latents"])
        for name, host_fields in host["readers"].items():
            fields, params = place(host_fields), frozen[name]
            for row in rows:
                if row in PROMPT_ROWS:
                    prompt = predict.prompt_from_text(params, fields[row])
                else:
                    prompt = predict.prompt_from_latents(trainable, params, _wire_fields(fields), latents[row], name)
                answer = {key: fields[key] for key in ("answer_inputs", "targets", "weights")}
                scores = jax.device_get(predict.score(params, prompt, answer, name))
                ids = jax.device_get(predict.generate(params, prompt, name, max_new_tokens))
                for position in np.flatnonzero(valid):
                    example = encoded.examples[indices[position]]
                    said = [int(token) for token in ids[position] if token >= 0]
                    prediction = answers.first_line(decode[name](said))
                    yield {
                        "id": example.id,
                        "reader": name,
                        "row": row,
                        "question": example.question,
                        "answers": list(example.answers),
                        "prediction": prediction,
                        "em": answers.exact_match(prediction, example.answers),
                        "f1": answers.f1(prediction, example.answers),
                    } | {key: float(value[position]) for key, value in scores.items()}


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


def _wire_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"before": fields["before"], "after": fields["after"]}
