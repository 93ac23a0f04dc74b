"""Evaluation rows of a wire of kind "cache": the text, its message at several ratios, another text's, and nothing."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lw_jax.core.eval_rows import ROWS, EvalRow
from lw_jax.core.progress import phase
from lw_jax.core.types import Tree
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.batches import Encoded, other_examples
from lw_jax.data.loader import batches_of
from lw_jax.data.prompt_tokens import Layout
from lw_jax.evals import cache_functions
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.evals.comparison import Record
from lw_jax.evals.control_rows import Session, number_texts, positions, records_of
from lw_jax.evals.record_log import RecordLog
from lw_jax.models import cache_codec, cache_message
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_codec import Coding
from lw_jax.models.cache_message import Sent
from lw_jax.models.wire import Prompt

REPEAT = "Repeat the text above word for word."  # asked in a question's place, before the text is read again
FIELDS = ("text", "none", "context", "asked")  # parts of the prompts that the rows are made of
LONG = ("own", "other", "text")  # fields as wide as a batch's texts need
LEAST_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class CacheEncoded(Encoded):
    """A data set of `attach`; in place of slots a message's channel has its ratio."""

    def count_slots(self, indices: Sequence[int], ratio: int | np.ndarray | None = None) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.ratio if ratio is None else ratio, np.int32), len(indices))

    def shuffled(self) -> "CacheEncoded":
        """Returns the same examples, each with the text of the next example of another context."""
        readers = {name: fields | {"own": fields["other"]} for name, fields in self.readers.items()}
        return dataclasses.replace(self, readers=readers)


def attach(encoded: Encoded, layout: Layout) -> CacheEncoded:
    """Returns passages, or questions encoded with "context", with each one's text, another one's, and what asks for it.

    A passage is answered when the reader is asked to repeat it.
    """
    others, readers = other_examples(encoded.examples), {}
    for name, fields in encoded.readers.items():
        before, again = fields["before"], ask_again(name, layout)
        if encoded.task == "answer":
            text_ids = [ids[len(start) :] for ids, start in zip(fields["context"].ids, before.ids, strict=True)]
        else:
            texts = [example.context for example in encoded.examples]
            frame = prompt_tokens.make_frame(name, layout.readers[name], layout.prompt)
            text_ids = prompt_tokens.tokenize_contexts(layout.readers[name].tokenizer, frame, texts)
            fields = fields | {"after": batches.field([again] * len(text_ids), before.pad, left=True)}
        ragged = {
            "own": text_ids,
            "other": [text_ids[other] for other in others],
            "again": [again] * len(text_ids),
        }
        base = {key: field for key, field in fields.items() if key != "context"}
        readers[name] = base | {key: batches.field(ids, before.pad, left=False) for key, ids in ragged.items()}
    source = dataclasses.replace(encoded.source, limit=0)
    values: dict[str, Any] = vars(encoded) | {"readers": readers, "source": source}
    return CacheEncoded(**values)


def ask_again(name: str, layout: Layout) -> np.ndarray:
    """Returns the ids that ask a reader, behind a text, for its repetition."""
    reader = layout.readers[name]
    frame = prompt_tokens.make_frame(name, reader, layout.prompt)
    return prompt_tokens.tokenize(reader.tokenizer, [frame.after(REPEAT) + frame.gap], behind=True)[0]


def round_columns(length: int) -> int:
    """Returns the least of 64, 96, 128, 192, 256, 384 ... that holds so many tokens: few programs, little padding."""
    whole = max(1 << (length - 1).bit_length(), LEAST_COLUMNS)
    return whole * 3 // 4 if length <= whole * 3 // 4 and whole > LEAST_COLUMNS else whole


def batches_by_length(encoded: Encoded, indices: Sequence[int], batch: int) -> Iterator[batches.Batch]:
    """Yields the examples at `indices` as `batches_of`, in batches of texts alike in length, no wider than these."""
    lengths = [max(len(fields["own"].ids[index]) for fields in encoded.readers.values()) for index in indices]
    order = [indices[place] for place in np.argsort(lengths, kind="stable")]
    for first in range(0, len(order), batch):
        part, readers = order[first : first + batch], {}
        for name, fields in encoded.readers.items():
            texts = {key: fields[key] for key in LONG}
            longest = {key: max(len(field.ids[index]) for index in part) for key, field in texts.items()}
            readers[name] = fields | {
                key: dataclasses.replace(field, width=min(round_columns(longest[key]), field.width))
                for key, field in texts.items()
            }
        yield from batches_of(dataclasses.replace(encoded, readers=readers), part, batch)


class RowPrompt(NamedTuple):
    """What a reader is given in one row, and of a message what it is made of."""

    prompt: Prompt
    positions: np.ndarray = np.zeros(0)  # f64[b], of a message: those that its heads keep, on the average
    sent: Sent | None = None
    ratio: int = 0


@dataclasses.dataclass(frozen=True)
class CacheSession(Session):
    """A wire with its codes."""

    functions: CacheFunctions
    codes: Mapping[str, Tree]  # reader's name -> its part of the tree, on its mesh
    ratio: int  # of the rows that name none

    def prompts(self, fields: Mapping[str, Any], name: str, rows: Sequence[str]) -> dict[str, RowPrompt]:
        """Returns each row's prompt; a text is read once for all of its rows."""
        params, code, functions = self.frozen[name], self.codes[name], self.functions

        @functools.cache
        def read(kind: str) -> Reading:  # "own" or "other": also the field of its text
            inputs = {"own": fields[kind], "before": fields["before"], "again": fields["again"]}
            return functions.read_twice(params, inputs, name, bool(np.asarray(code["fitted"]).any()))

        @functools.cache
        def write(kind: str, ratio: int) -> RowPrompt:
            (sent,) = functions.write(code, read(kind), [ratio], name)
            count = cache_functions.count_kept(code, np.asarray(fields[kind]["mask"]).sum(axis=1), ratio)
            prompt = functions.prompt_from_cache(params, code, fields, sent, name)
            return RowPrompt(prompt, count.mean(axis=(0, 2)), sent, ratio)

        def make(row: EvalRow) -> RowPrompt:
            if row.latents:
                return write(row.latents, row.ratio or self.ratio)
            if row.taught:
                parts = {key: fields[key] for key in ("before", "own", "asked")}
                return RowPrompt(functions.prompt_from_taught_parts(params, parts, self.taught[name]))
            return RowPrompt(functions.prompt_from_text(params, fields[row.fields[0]]))

        return {row: make(ROWS[row]) for row in rows}


def measure(  # noqa: PLR0913
    bench: CacheSession,
    encoded: Encoded,
    indices: Sequence[int],
    *,
    rows: Sequence[str],
    batch: int,
    max_new_tokens: int,
    log: RecordLog,
) -> list[Record]:
    """Returns every reader's records of `rows`; those that the log has are not measured again.

    `encoded` is of `attach`, `rows` of `core.eval_rows.KNOWN_TO_CACHE`. Records at the wire's ratio have the "bytes" of
    a message for the reader alone. The log takes the records of each batch.
    """
    codings = {name: cache_message.coding_of(code) for name, code in bench.codes.items()}
    texts, total = number_texts(encoded), -(-len(indices) // batch) * len(encoded.readers)
    with phase("reading the questions in every row of the table", total, "batches") as done:
        for host in batches_by_length(encoded, indices, batch):
            for name, host_fields in host["readers"].items():
                missing = log.missing(name, rows, host["index"][host["valid"]].tolist())
                if not missing:
                    done.skip()
                    continue
                fields = bench.functions.place(host_fields, name)
                for row, row_prompt in bench.prompts(fields, name, missing).items():
                    outputs = bench.answer(fields, name, row_prompt.prompt, max_new_tokens=max_new_tokens)
                    taken = row_prompt.positions
                    if row_prompt.sent is None:
                        taken = [positions(encoded, name, row, index, slots=0) for index in host["index"]]
                    records = records_of(encoded, host, name, row, outputs, taken, texts)
                    if ROWS[row].latents == "own" and row_prompt.ratio == bench.ratio and not ROWS[row].swapped:
                        _measure_sizes(records, host, codings[name], row_prompt)
                    log.add(records)
                done.advance()
    return log.read(tuple(encoded.readers), rows, indices)


def _measure_sizes(records: Sequence[Record], host: Mapping[str, Any], coding: Coding, row_prompt: RowPrompt) -> None:
    """Adds the bytes of each example's message for its reader alone, and the tokens of its text."""
    assert row_prompt.sent is not None, "of a message"
    sent = jax.device_get(row_prompt.sent)
    for record, place in zip(records, np.flatnonzero(host["valid"]).tolist(), strict=True):
        section = cache_message.to_section({row_prompt.ratio: sent}, place)
        size = len(cache_codec.pack([(coding, section)], writer=coding.fingerprint))
        record |= {"bytes": size, "text_tokens": len(section.numbers)}
