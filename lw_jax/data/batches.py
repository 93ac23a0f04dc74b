"""Examples as token ids, tokenised once, and collation into static-shape batches of numpy arrays.

The only module that shifts labels. An answer is in `answer_inputs`, `targets` and `weights` and in no other field.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.eval_rows import PROMPT_FIELDS
from lw_jax.core.files import content_hash
from lw_jax.core.types import EXACT, Example, Task
from lw_jax.data import example_counts
from lw_jax.data.example_counts import REASONS, DropCounts
from lw_jax.data.frozen_cache import CachedRows, key_of
from lw_jax.data.prompt_tokens import Layout, ReaderPass, count_slots, read_source

_log = logging.getLogger(__name__)

Batch = dict[str, Any]

TASKS = {"answer": "questions", "reconstruct": "passages to repeat", "continuation": "passages to continue"}
# A reader's fields that are reported, in this order.
SHOWN = {"own": "text", "text": "prompt with the text", "after": "question", "answer": "answer"}
MULTIPLE = 8  # widths are rounded up to it, so that data sets of similar lengths share one compiled program


@dataclasses.dataclass(frozen=True)
class Field:
    """One ragged batch field and the static shape it is padded to."""

    ids: list[np.ndarray]  # i32, one row an example
    width: int
    pad: int
    left: bool
    limit: int = 0  # most tokens that the configuration allows a row; 0: none

    @property
    def longest(self) -> str:
        """Returns the tokens of the longest row beside the limit, as "17 of 24"."""
        return f"{max(map(len, self.ids)):,}{f' of {self.limit:,}' if self.limit else ''}"

    def collate(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns ids i32[b width] and mask bool[b width]."""
        ids = np.full((len(indices), self.width), self.pad, np.int32)
        mask = np.zeros((len(indices), self.width), bool)
        for row, index in enumerate(indices):
            values = self.ids[index]
            start = self.width - len(values) if self.left else 0
            ids[row, start : start + len(values)] = values
            mask[row, start : start + len(values)] = True
        return {"ids": ids, "mask": mask}


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A tokenised data set; `index` in a batch is a position in `examples`."""

    examples: tuple[Example, ...]
    source: Field
    # before, after, answer (absent for prompts), and the asked prompt rows
    readers: dict[str, dict[str, Field]]
    counts: dict[str, int]  # given, kept, and dropped or cut by reason
    slots: int  # of a message, at most, and the width of a latent
    width: int
    ratio: int = 0  # tokens of a source a slot; 0: every message has all slots
    task: str = "answer"  # the readers' task
    teachers: Mapping[str, CachedRows] = dataclasses.field(default_factory=dict)  # by reader, where the KL needs one
    # reader's name -> prompt field -> tokens of each example's prompt that hold the context
    context_tokens: Mapping[str, Mapping[str, Sequence[int]]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def collate(
        self, indices: Sequence[int], *, rows: Iterable[str] | None = None, sizes: np.ndarray | None = None
    ) -> Batch:
        """Returns the Batch of docs/architecture.md with all encoded prompt rows, or only the named ones.

        `sizes` i32[b 4]: ratio, slots, width and bits of each example's message; 0: by `ratio`, whole and exact.
        """
        ratio, slots, width, bits = np.zeros((4, len(indices)), np.int32) if sizes is None else sizes.T
        counts = self.count_slots(indices, np.where(ratio, ratio, self.ratio))
        columns = [np.where(slots, slots, counts), np.where(width, width, self.width), np.where(bits, bits, EXACT)]
        channel = np.stack(columns, axis=1).astype(np.int32)
        left_out = {"answer"} if rows is None else {"answer", *PROMPT_FIELDS}.difference(rows)
        readers = {}
        for name, fields in self.readers.items():
            readers[name] = {key: fields[key].collate(indices) for key in fields if key not in left_out}
            readers[name] |= {"channel": channel, "task": Task(self.task)}
            if name in self.teachers:
                readers[name]["teacher"] = self.teachers[name](indices)
            if "answer" in fields:
                readers[name] |= _shift(fields["answer"].collate(indices), fields["answer"].pad)
        source = self.source.collate(indices) | {"channel": channel}
        return {"source": source, "readers": readers, "index": np.array(indices, np.int32)}

    def count_slots(self, indices: Sequence[int], ratio: int | np.ndarray | None = None) -> np.ndarray:
        """Returns i32[b]: the slots of each message at so many tokens a slot, one for all or of each; None: its own."""
        tokens = [len(self.source.ids[index]) for index in indices]
        return count_slots(tokens, ratio=self.ratio if ratio is None else ratio, most=self.slots)

    def untaught(self) -> "Encoded":
        """Returns the data set with zeros for the teachers' values, which need not be cached yet."""
        blank = {name: dataclasses.replace(teacher, blank=True) for name, teacher in self.teachers.items()}
        return dataclasses.replace(self, teachers=blank)

    def probe(self) -> Batch:
        return self.untaught().collate([0])

    def digest(self) -> str:
        fields = {f"{name}/{key}": field for name, reader in self.readers.items() for key, field in reader.items()}
        fields["source"] = self.source
        content = {name: [field.width, key_of(*field.ids).hex()] for name, field in fields.items()}
        return content_hash([self.task, content])

    def shuffled(self) -> "Encoded":
        """Returns the same examples, each with the text of the next example of another context."""
        ids = [self.source.ids[i] for i in other_examples(self.examples)]
        return dataclasses.replace(self, source=dataclasses.replace(self.source, ids=ids))

    def describe(self) -> list[str]:
        used, *lines = example_counts.describe(self.counts, TASKS[self.task])
        if self.source.limit:  # else no encoder reads texts, but each reader: "own"
            used = f"{used}; the longest text has {self.source.longest} tokens"
        lines = [used, *lines]
        for name, fields in self.readers.items():
            shown = [key for key in SHOWN if key in fields and (key != "after" or self.task == "answer")]
            longest = (f"longest {SHOWN[key]} {fields[key].longest}" for key in shown)
            lines.append(f"  {name}: {', '.join(longest)} tokens")
        return lines


def one_context(examples: Sequence[Example]) -> bool:
    """Returns whether all examples are about one text, so that no other one can be sent in its place."""
    return len({example.context for example in examples}) < 2


def other_examples(examples: Sequence[Example]) -> list[int]:
    """Returns, for each example, the next one (cyclically) with another context, whose latents a control sends.

    A piece of a text and the pieces that continue it have the first one behind them: a context is no answer. Where
    there is no other context, the example itself is returned.
    """
    contexts, count = [example.context for example in examples], len(examples)
    other = next((index for index, context in enumerate(contexts) if context != contexts[-1]), None)
    if other is None:
        return list(range(count))

    def differs(index: int, other: int) -> bool:
        answers = (answer.strip() for answer in examples[index].answers)
        return contexts[other] != contexts[index] and contexts[other] not in answers

    others = [0] * count
    for index in reversed(range(count)):
        following = (index + 1) % count
        if differs(index, following):
            other = following
        elif not differs(index, other):
            other = next((one for one in range(count) if differs(index, one)), index)
        others[index] = other
    return others


def encode(examples: Sequence[Example], *, layout: Layout, rows: Iterable[str] = ()) -> Encoded:
    """Returns the examples as token ids, with those of `core.eval_rows.PROMPT_FIELDS` that `rows` names.

    All have answers, or none has and they become prompts: batches without answer fields. An example is dropped for all
    readers or for none. Raises UserError for an overlong context under data.overlong="refuse", and when none is left.
    """
    drops = DropCounts([example.id for example in examples])
    answered = any(example.answers for example in examples)
    source = read_source([example.context for example in examples], layout, drops)
    passes = {name: ReaderPass(name, reader, layout, drops) for name, reader in layout.readers.items()}
    slots = layout.count_slots(source).tolist()
    tokens = {name: reader.read(examples, set(rows), answered, slots=slots) for name, reader in passes.items()}
    keep = drops.apply_policy(layout.data.overlong)
    limits = {
        "after": layout.data.question_tokens,
        "text": layout.data.context_tokens,
        "context": layout.data.context_tokens,
        "answer": layout.data.answer_tokens,
    }

    def kept_field(key: str, ids: list[np.ndarray], pad: int) -> Field:
        return field([ids[i] for i in keep], pad, left=key != "answer", limit=limits.get(key, 0))

    return Encoded(
        examples=tuple(examples[i] for i in keep),
        source=source_field([source[i] for i in keep], layout),
        readers={
            name: {key: kept_field(key, ids, layout.readers[name].tokenizer.pad) for key, ids in fields.items()}
            for name, fields in tokens.items()
        },
        counts=drops.counts(),
        slots=layout.slots,
        width=layout.width,
        ratio=layout.ratio,
        context_tokens={
            name: {key: [counts[i] for i in keep] for key, counts in reader.context_tokens.items()}
            for name, reader in passes.items()
        },
    )


def encode_prompt(context: str, question: str, *, layout: Layout, rows: Iterable[str] = ()) -> Batch:
    """Returns a batch of one prompt without answer fields. Raises UserError where a data set would drop it."""
    return encode_prompts([Example("prompt", context, question, ())], layout=layout, rows=rows)


def encode_prompts(asked: Sequence[Example], *, layout: Layout, rows: Iterable[str] = ()) -> Batch:
    """Returns a batch of prompts without answer fields. Raises UserError where a data set would drop one of them."""
    bare = []
    for item in asked:
        if not item.context.strip() or not item.question.strip():
            raise UserError(f"a prompt needs a context and a question; found {item.context!r} and {item.question!r}")
        bare.append(dataclasses.replace(item, context=item.context.strip(), question=item.question.strip()))
    encoded = encode(bare, layout=layout, rows=rows)
    if len(encoded) < len(bare):
        for item in bare:
            encode([item], layout=layout, rows=rows)  # says which one and why
        raise AssertionError("a prompt is dropped for what it is alone")
    for reason in ("source_cut", "text_cut"):
        if encoded.counts[reason]:
            _log.warning("%d of %d %s", encoded.counts[reason], len(bare), REASONS[reason])
    return encoded.collate(range(len(bare)))


def source_field(ids: list[np.ndarray], layout: Layout) -> Field:
    """Returns the encoder's field; beyond one window its width is a whole number of windows."""
    longest = max(map(len, ids))
    windows = -(-longest // layout.window)
    width = width_of(longest, layout.window) if windows < 2 else windows * layout.window
    return Field(ids, width, layout.source.pad, left=False, limit=layout.window * layout.windows)


def field(ids: list[np.ndarray], pad: int, *, left: bool, limit: int = 0) -> Field:
    """Returns a field as wide as its longest row, rounded up but to no more than `limit` (0: none)."""
    return Field(ids, width_of(max(map(len, ids)), limit), pad, left, limit)


def width_of(longest: int, limit: int) -> int:
    """Returns the width of rows of which the longest is this: rounded up, but to no more than `limit` (0: none)."""
    width = -(-longest // MULTIPLE) * MULTIPLE
    return min(width, limit) if limit else width


def fill(batch: Batch, rows: int) -> Batch:
    """Returns the batch with its last example repeated up to so many rows; the repetitions weigh nothing."""
    count = len(batch["index"])
    if count == rows:
        return batch
    chosen = np.minimum(np.arange(rows), count - 1)
    return weigh(jax.tree.map(lambda leaf: leaf[chosen], batch), np.arange(rows) < count)


def weigh(batch: Batch, valid: np.ndarray) -> Batch:
    """Returns the batch with the weights zeroed of rows that are not valid bool[b]: they add nothing to any sum."""
    readers = {
        name: fields | {"weights": fields["weights"] * valid[:, None]} for name, fields in batch["readers"].items()
    }
    return batch | {"readers": readers}


def _shift(answer: dict[str, np.ndarray], pad: int) -> Batch:
    """Returns the answer's fields: input i is target i - 1; EOS is a target, never an input."""
    ids, mask = answer["ids"], answer["mask"]
    inputs = np.where(mask[:, 1:], ids[:, :-1], np.int32(pad))
    return {"answer_inputs": inputs, "targets": ids, "weights": mask.astype(np.float32)}
