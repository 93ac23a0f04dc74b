"""Texts with one entity changed: another example's answer stands where the own one stood."""

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np

from lw_jax.core.progress import phase
from lw_jax.core.types import Example
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.batches import Encoded
from lw_jax.evals.answers import contains, normalise


@dataclasses.dataclass(frozen=True)
class Swaps:
    """Changed examples as token ids; each has the new answer as its only reference."""

    encoded: Encoded
    origins: list[int]  # of each changed example, its original's position in the evaluated data set
    replaced: list[str]  # of each, the original answer

    def describe(self, rows: Sequence[str], count: int) -> str:
        """Returns a line on how many of `count` questions the rows have."""
        return f"{', '.join(rows)}: {len(self.origins)} of {count} questions have an answer that can be replaced"


def swap(example: Example, others: Sequence[Example]) -> Example | None:
    """Returns the example with its first answer replaced wherever it occurs in the context, as a whole word or number.

    The new answer is the first of the others' that is of the same kind (a number, a capitalised name, or neither), of
    as many words where one is, not in the context, and does not contain an own answer. None where the answer does not
    occur in the context, no other one is left, or an own answer still stands in the changed context.
    """
    old = example.answers[0]
    pattern = re.compile(rf"(?<!\w)(?<!\d[.,]){re.escape(old)}(?![.,]?\d)(?!\w)")
    if not normalise(old) or not pattern.search(example.context):
        return None
    known = {normalise(answer) for answer in example.answers}

    def serves(new: str) -> bool:
        if not normalise(new) or normalise(new) in known or contains(example.context, new):
            return False
        # An answer that holds the old one would not show which of the two the reader means.
        return not any(contains(new, answer) for answer in example.answers)

    def unlike(new: str) -> tuple[bool, int]:
        return _kind(new) != _kind(old), abs(len(new.split()) - len(old.split()))

    # In order, as each search reads the whole text: most often the first one serves.
    new = next(filter(serves, sorted((other.answers[0] for other in others), key=unlike)), None)
    if new is None:
        return None
    context = pattern.sub(lambda _: new, example.context)
    if any(contains(context, answer) for answer in example.answers):
        return None
    return dataclasses.replace(example, context=context, answers=(new,))


def make(
    encoded: Encoded,
    indices: Sequence[int],
    *,
    layout: prompt_tokens.Layout,
    fields: Sequence[str],
) -> Swaps:
    """Returns those of the examples that can be changed in what is read of their texts; empty lists where none can.

    Each takes its answer from the next of `indices`, cyclically. Static widths are at least those of `encoded`, so
    that most compiled programs serve both.
    """
    examples = [encoded.examples[index] for index in indices]
    changed: list[Example] = []
    with phase("exchanging answers in the texts", len(examples), "questions") as done:
        for position, example in enumerate(done.track(examples)):
            new = swap(example, examples[position + 1 :] + examples[:position])
            if new is not None:
                changed.append(dataclasses.replace(new, id=str(position)))
    # `encode` refuses data without a usable example, so an unchanged one follows, which is not measured.
    changed.append(dataclasses.replace(examples[0], id=str(len(examples))))
    data = layout.data if layout.data.overlong == "cut" else dataclasses.replace(layout.data, overlong="drop")
    encode = functools.partial(batches.encode, layout=dataclasses.replace(layout, data=data), rows=fields)
    if data.overlong == "cut":
        known = _read_changed(encode(changed), encoded, indices)
        changed = [example for example in changed[:-1] if example.id in known] + changed[-1:]
    swapped = _widen(encode(changed), encoded)
    positions = [int(example.id) for example in swapped.examples]
    positions = positions[:-1] if positions[-1] == len(examples) else positions
    return Swaps(swapped, [indices[i] for i in positions], [examples[i].answers[0] for i in positions])


def _kind(answer: str) -> str:
    if any(character.isdigit() for character in answer):
        return "number"
    return "name" if answer[0].isupper() else "other"


def _read_changed(swapped: Encoded, encoded: Encoded, indices: Sequence[int]) -> set[str]:
    """Returns the ids of the examples whose change everybody reads: of the others it is in what was cut away."""
    pairs = [(swapped.source, encoded.source)] + [
        (field, encoded.readers[name][key])
        for name, fields in swapped.readers.items()
        for key, field in fields.items()
        if key in ("text", "context") and key in encoded.readers[name]
    ]
    return {
        example.id
        for place, example in enumerate(swapped.examples)
        if int(example.id) < len(indices)
        and not any(np.array_equal(new.ids[place], old.ids[indices[int(example.id)]]) for new, old in pairs)
    }


def _widen(encoded: Encoded, least: Encoded) -> Encoded:
    """Returns the data set with static widths of at least those of another one."""
    readers = {
        name: {
            key: dataclasses.replace(field, width=max(field.width, least.readers[name][key].width))
            if key in least.readers[name]
            else field
            for key, field in fields.items()
        }
        for name, fields in encoded.readers.items()
    }
    source = dataclasses.replace(encoded.source, width=max(encoded.source.width, least.source.width))
    return dataclasses.replace(encoded, readers=readers, source=source)
