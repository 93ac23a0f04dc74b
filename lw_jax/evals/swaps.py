"""Texts with one entity changed: another example's answer stands where the own one stood."""

import dataclasses
import re
from collections.abc import Sequence

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


def swap(example: Example, others: Sequence[Example]) -> Example | None:
    """Returns the example with its first answer replaced wherever it occurs in the context, as a whole word.

    The new answer is the first of the others' that is of the same kind (a number, a capitalised name, or neither), of
    as many words where one is, not in the context, and does not contain an own answer. None where the answer does not
    occur in the context, or no other one is left.
    """
    old = example.answers[0]
    pattern = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
    if not normalise(old) or not pattern.search(example.context):
        return None
    known = {normalise(answer) for answer in example.answers}
    found = [other.answers[0] for other in others if normalise(other.answers[0]) not in known]
    found = [new for new in found if normalise(new) and not contains(example.context, new)]
    # An answer that holds the old one would not show which of the two the reader means.
    found = [new for new in found if not any(contains(new, one) for one in example.answers)]
    if not found:
        return None
    new = min(found, key=lambda new: (_kind(new) != _kind(old), abs(len(new.split()) - len(old.split()))))
    return dataclasses.replace(example, context=pattern.sub(lambda _: new, example.context), answers=(new,))


def make(
    encoded: Encoded,
    indices: Sequence[int],
    *,
    layout: prompt_tokens.Layout,
    fields: Sequence[str],
) -> Swaps:
    """Returns those of the examples that can be changed; empty lists where none can.

    Each takes its answer from the next of `indices`, cyclically. Static widths are at least those of `encoded`, so
    that most compiled programs serve both.
    """
    own = [encoded.examples[index] for index in indices]
    changed: list[Example] = []
    for position, example in enumerate(own):
        new = swap(example, own[position + 1 :] + own[:position])
        if new is not None:
            changed.append(dataclasses.replace(new, id=str(position)))
    # `encode` refuses data without a usable example, so an unchanged one follows, which is not measured.
    changed.append(dataclasses.replace(own[0], id=str(len(own))))
    data = layout.data if layout.data.overlong == "cut" else dataclasses.replace(layout.data, overlong="drop")
    found = _widen(batches.encode(changed, layout=dataclasses.replace(layout, data=data), rows=fields), encoded)
    kept = [int(example.id) for example in found.examples]
    kept = kept[:-1] if kept[-1] == len(own) else kept
    return Swaps(found, [indices[position] for position in kept], [own[position].answers[0] for position in kept])


def _kind(answer: str) -> str:
    if any(character.isdigit() for character in answer):
        return "number"
    return "name" if answer[0].isupper() else "other"


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
