"""Control table: each reader's answers from text, from latents and from controls that expose a collapsed wire.

Depends on a `WireSession` (a wire's functions and weights) and on data, on no recipe and no checkpoint.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lw_jax.core import config, processes
from lw_jax.core.compiling import compile_together
from lw_jax.core.eval_rows import ROWS
from lw_jax.core.progress import phase
from lw_jax.core.types import SHARED, Example, Tree
from lw_jax.data import batches
from lw_jax.data.batches import Encoded, other_examples
from lw_jax.data.examples import spread
from lw_jax.data.loader import batches_of
from lw_jax.data.tokens import Tokenizer
from lw_jax.evals import answers, message_latents
from lw_jax.evals.comparison import Record
from lw_jax.evals.message_latents import Sent
from lw_jax.evals.record_log import RecordLog
from lw_jax.evals.swaps import Swaps
from lw_jax.evals.wire_functions import WireFunctions

WIRE = ("before", "after", "channel", "task")  # a reader's fields around its latents
PROBE, KEPT = "probe", "kept"  # of rows with a compacted text: see `attach_ceiling`
ANSWER = ("answer_inputs", "targets", "weights")  # its scored fields


@dataclasses.dataclass(frozen=True)
class Session:
    """Frozen readers with their tokenizers, and the functions of a wire of any kind."""

    functions: WireFunctions
    frozen: Tree
    tokenizers: Mapping[str, Tokenizer]
    taught: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict, kw_only=True)  # name -> vectors f32[k d]

    def score(self, fields: Mapping[str, Any], name: str, prompt: Any) -> dict[str, np.ndarray]:
        """Returns nll, hits, first, first5 and tokens [b] of the reference answers of this process's rows."""
        answer = {key: fields[key] for key in ANSWER}
        return self.functions.fetch(self.functions.score(self.frozen[name], prompt, answer, name), name)

    def answer(
        self, fields: Mapping[str, Any], name: str, prompt: Any, *, max_new_tokens: int
    ) -> tuple[list[str], dict[str, np.ndarray]]:
        """Returns a reader's greedy answers to this process's rows, and `score` of the reference answers."""
        answer = {key: fields[key] for key in ANSWER}
        outputs = self.functions.answer(self.frozen[name], prompt, answer, name, max_new_tokens)
        ids, scores = self.functions.fetch(outputs, name)
        texts = [self.tokenizers[name].decode([int(token) for token in row if token >= 0]) for row in ids]
        return texts, scores


@dataclasses.dataclass(frozen=True)
class WireSession(Session):
    """A trained wire with its weights."""

    trainable: Tree

    def encode(self, source: Tree) -> np.ndarray:
        """Returns the latents f32[b m z] of this process's rows of a batch's source."""
        placed = self.functions.place(source, None)
        latents = self.functions.encode(self.trainable, placed, self.frozen.get(SHARED))
        return np.asarray(self.functions.fetch(latents, None), np.float32)

    def prompt(self, fields: Mapping[str, Any], name: str, *, row: str, latents: jax.Array | None) -> Any:
        """Returns a reader's prompt for one row from its placed fields; `latents` are None for text rows."""
        params = self.frozen[name]
        if ROWS[row].compacted:
            inputs = {key: fields[key] for key in ("before", *ROWS[row].fields, PROBE, KEPT)}
            vectors = self.taught[name] if ROWS[row].taught else None
            return self.functions.prompt_from_compacted_text(params, inputs, vectors, name)
        if ROWS[row].taught:
            inputs = {part: fields[key] for part, key in zip(("context", "asked"), ROWS[row].fields, strict=True)}
            return self.functions.prompt_from_taught_text(params, inputs, self.taught[name])
        if not ROWS[row].latents:
            return self.functions.prompt_from_text(params, fields[ROWS[row].fields[0]])
        assert latents is not None, row
        wire = {key: fields[key] for key in WIRE if key in fields}
        return self.functions.prompt_from_latents(self.trainable, params, wire, latents, name)

    def answer_program(self, fields: Mapping[str, Any], name: str, prompt: Any, most: int) -> tuple[Any, tuple]:
        """Returns the jitted function that reads a prompt for `answer`, and its arguments."""
        answer = {key: fields[key] for key in ANSWER}
        return self.functions.answer_program(name), (self.frozen[name], prompt, answer, name, most)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Records of the control table, with their examples and latents."""

    encoded: Encoded
    indices: list[int]  # of the measured examples, in `encoded`
    latents: np.ndarray  # f32[n m z], of the same examples
    records: list[Record]  # one per example, reader and row: identity, prediction, scores

    @property
    def examples(self) -> list[Example]:
        """The measured examples, in the order of `indices`."""
        return [self.encoded.examples[index] for index in self.indices]

    def of(self, reader: str, row: str) -> list[Record]:
        """Returns one reader's records of one row, in the order of `indices`."""
        return [record for record in self.records if (record["reader"], record["row"]) == (reader, row)]


def measure(
    bench: WireSession,
    encoded: Encoded,
    *,
    options: config.Eval,
    seed: int = 0,
    swaps: Swaps | None = None,
    log: RecordLog | None = None,
) -> Measured:
    """Returns every reader's answers and scores in the configured rows.

    `encoded` has the fields that `options.rows` need, `seed` is of random latents. Records of `swaps`, for the rows of
    changed examples, have the original's "index" and "follows": whether the answer is the new one and not the old one.
    The log takes the records of each batch; those that it has are not measured again.
    """
    log = RecordLog() if log is None else log
    indices = spread(len(encoded), options.examples)
    plain = [row for row in options.rows if not ROWS[row].swapped]
    kinds = {ROWS[row].latents for row in plain}
    settings: Any = {"batch": options.batch, "seed": seed}
    latents = message_latents.make(bench.encode, encoded, indices, kinds=kinds, **settings)
    records: list[Record] = []
    if plain:
        records = _read(bench, encoded, indices, rows=plain, latents=latents, options=options, log=log)
    changed = [row for row in options.rows if ROWS[row].swapped]
    if changed and swaps is not None and swaps.origins:
        swap_indices = list(range(len(swaps.origins)))
        sent = message_latents.make(bench.encode, swaps.encoded, swap_indices, kinds=set(), **settings)
        swapped_records = _read(
            bench, swaps.encoded, swap_indices, rows=changed, latents=sent, options=options, log=log
        )
        records += follow(swapped_records, swaps, encoded)
    return Measured(encoded, indices, latents["own"].values, records)


def follow(records: Iterable[Record], swaps: Swaps, encoded: Encoded) -> list[Record]:
    """Returns the records of changed examples as of their originals, with "follows"; see `measure`."""
    relabelled, texts = [], number_texts(encoded)
    for record in records:
        position = record["index"]
        index, new, old = swaps.origins[position], record["answers"][0], swaps.replaced[position]
        prediction = record["prediction"]
        follows = float(answers.contains(prediction, new) and not answers.contains(prediction, old))
        of_original = {"index": index, "text": texts[index], "id": encoded.examples[index].id}
        relabelled.append(record | of_original | {"follows": follows})
    return relabelled


def _read(  # noqa: PLR0913
    bench: WireSession,
    encoded: Encoded,
    indices: Sequence[int],
    *,
    rows: Sequence[str],
    latents: Mapping[str, Sent],
    options: config.Eval,
    log: RecordLog,
) -> list[Record]:
    groups: list[list[Record]] = []  # of each batch, reader and row
    texts, most, compiled = number_texts(encoded), options.max_new_tokens, False
    total = -(-len(indices) // options.batch) * len(encoded.readers) * len(rows)
    with phase("answering the questions in every row of the table", total, "batches") as done:
        for host in batches_of(encoded, indices, options.batch, share=processes.share()):
            here = host["index"][host["valid"]].tolist()
            # Several processes compute each batch together, also those that have no example of it.
            alone = jax.process_count() == 1
            missing = {name: log.missing(name, rows, here) if alone else rows for name in encoded.readers}
            done.skip(sum(len(rows) - len(left) for left in missing.values()))
            if not compiled and any(missing.values()):
                compile_together(
                    bench.answer_program(request.fields, request.reader, request.prompt, most)
                    for request in _ask(bench, host, missing, latents)
                )
                compiled = True
            for request in _ask(bench, host, missing, latents):
                name, row = request.reader, request.row
                outputs = bench.answer(request.fields, name, request.prompt, max_new_tokens=most)
                taken = [
                    positions(encoded, name, row, index, slots=int(slots))
                    for index, slots in zip(host["index"], request.slots, strict=True)
                ]
                log.add(records_of(encoded, host, name, row, outputs, taken, texts))
                done.advance()
            groups += [log.read([name], [row], here) for name in encoded.readers for row in rows]
    return merge(groups)


def records_of(  # noqa: PLR0913
    encoded: Encoded,
    host: Mapping[str, Any],
    name: str,
    row: str,
    outputs: tuple[list[str] | None, dict[str, np.ndarray]],
    taken: Sequence[float] | np.ndarray,
    texts: Sequence[int],
) -> list[Record]:
    """Returns one reader's records of one row of a batch, of its real examples.

    `outputs`: of `Session.answer`; no predictions where nothing was generated. `taken`: the positions of each example's
    context; `texts`: of `number_texts`.
    """
    predictions, scores = outputs
    records = []
    for position, index in enumerate(host["index"].tolist()):
        if host["valid"][position]:
            record: Record = {"reader": name, "row": row, "index": index, "text": texts[index]}
            if predictions is not None:
                record |= judge(encoded.examples[index], predictions[position])
            record |= {key: float(value[position]) for key, value in scores.items()}
            records.append(record | {"positions": float(taken[position])})
    return records


class _Request(NamedTuple):
    """A batch as one reader is asked it in one row."""

    reader: str
    row: str
    fields: Tree  # the reader's, on its mesh
    slots: np.ndarray  # i32[b], of the message; 0: no message
    prompt: Any


def _ask(
    bench: WireSession, host: Mapping[str, Any], rows: Mapping[str, Sequence[str]], latents: Mapping[str, Sent]
) -> Iterator[_Request]:
    """Yields a batch as each reader is asked it in each of its rows; a prompt is made when it is its turn."""
    places = host["position"]
    for name, wanted in rows.items():
        if not wanted:
            continue
        host_fields = host["readers"][name]
        fields = bench.functions.place(host_fields, name)
        for row in wanted:
            inputs, sent, slots = fields, None, np.zeros(len(places), np.int32)
            if ROWS[row].latents:
                values, counts = latents[ROWS[row].latents]
                slots = counts[places]
                channel = np.concatenate([slots[:, None], host_fields["channel"][:, 1:]], axis=1)
                inputs = fields | {"channel": bench.functions.place(channel, name)}
                sent = bench.functions.place(values[places], None)
            yield _Request(name, row, fields, slots, bench.prompt(inputs, name, row=row, latents=sent))


def describe_measured(encoded: Encoded, options: config.Eval) -> list[str]:
    """Returns lines: how many are measured, if not all, and of how many a reader cannot generate the whole answer."""
    indices = spread(len(encoded), options.examples)
    lines = [f"  {len(indices):,} of them are measured"] if len(indices) < len(encoded) else []
    for name, fields in encoded.readers.items():
        lengths = (len(fields["answer"].ids[index]) - 1 for index in indices)  # without EOS
        if count := sum(length > options.max_new_tokens for length in lengths):
            rule = f"longer than config.eval.max_new_tokens={options.max_new_tokens}"
            lines.append(f"  {name}: the answers of {count:,} of {len(indices):,} measured questions are {rule}")
    return lines


def number_texts(encoded: Encoded) -> list[int]:
    """Returns each example's text: the index of the first example about it."""
    first: dict[str, int] = {}
    return [first.setdefault(example.context, index) for index, example in enumerate(encoded.examples)]


def positions(encoded: Encoded, reader: str, row: str, index: int, *, slots: int) -> int:
    """Returns the reader positions that hold an example's context in a row: of a message, or of a text's tokens.

    A message has its `slots` and the task's vector.
    """
    eval_row = ROWS[row]
    if eval_row.latents:
        return slots + 1
    fields = (KEPT,) if eval_row.compacted else eval_row.fields
    return sum(encoded.context_tokens[reader][field][index] for field in fields) + eval_row.taught


def attach_ceiling(encoded: Encoded, indices: Sequence[int]) -> Encoded:
    """Returns the data set with the fields of a compacted text for the examples at `indices`.

    Rows `ceiling` have a reader's own keys and values of the text, reduced to a message's positions without training:
    they tell a message that is too short from a wire that is bad (`models.attention_matching`). PROBE is a question
    about another text, whose queries choose what is kept; KEPT has as many real tokens as the message of the example
    takes positions. `encoded` has the fields "context" and "asked".
    """
    readers, counts = {}, {}
    others, slots = other_examples(encoded.examples), dict(zip(indices, encoded.count_slots(indices), strict=True))
    for name, fields in encoded.readers.items():
        question, tokens = fields["asked"], encoded.context_tokens[name]["context"]
        rooms = [
            positions(encoded, name, "latents", index, slots=int(slots[index])) if index in slots else 0
            for index in range(len(encoded))
        ]
        probe = dataclasses.replace(question, ids=[question.ids[other] for other in others])
        kept = batches.field([np.zeros(room, np.int32) for room in rooms], question.pad, left=False)
        readers[name] = fields | {PROBE: probe, KEPT: kept}
        lengths = [min(room, count) for room, count in zip(rooms, tokens, strict=True)]
        counts[name] = {**encoded.context_tokens[name], KEPT: lengths}
    return dataclasses.replace(encoded, readers=readers, context_tokens=counts)


def merge(groups: list[list[Any]]) -> list[Any]:
    """Returns the entries of all processes' groups: group by group, in each that of process 0 first."""
    return [entry for group in zip(*processes.gather(groups), strict=True) for part in group for entry in part]


def judge(example: Example, prediction: str) -> Record:
    """Returns a prediction with its question, references, exact match and F1.

    Of what was generated it is the first line, unless a reference has several.
    """
    if not any("\n" in reference.strip() for reference in example.answers):
        prediction = answers.first_line(prediction)
    return {
        "id": example.id,
        "question": example.question,
        "answers": list(example.answers),
        "prediction": prediction.strip(),
        "em": answers.exact_match(prediction, example.answers),
        "f1": answers.f1(prediction, example.answers),
    }
