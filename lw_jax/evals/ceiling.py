"""Rows `ceiling`: a reader's own keys and values of the text, reduced to a message's positions without training.

They tell a message that is too short from a wire that is bad (`models.attention_matching`).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lw_jax.data import batches
from lw_jax.data.batches import Encoded, other_examples
from lw_jax.evals.control_rows import KEPT, PROBE, positions


def attach(encoded: Encoded, indices: Sequence[int]) -> Encoded:
    """Returns the data set with the fields of a compacted text for the examples at `indices`.

    PROBE is a question about another text, whose queries choose what is kept; KEPT has as many real tokens as the
    message of the example takes positions.

    Args:
        encoded: the data set, with the fields "context" and "asked".
        indices: its measured examples.
    """
    readers, counts = {}, {}
    others, slots = other_examples(encoded.examples), dict(zip(indices, encoded.count_slots(indices), strict=True))
    for name, fields in encoded.readers.items():
        asked, tokens = fields["asked"], encoded.context_tokens[name]["context"]
        rooms = [
            positions(encoded, name, "latents", index, slots=int(slots[index])) if index in slots else 0
            for index in range(len(encoded))
        ]
        probe = dataclasses.replace(asked, ids=[asked.ids[other] for other in others])
        kept = batches.field([np.zeros(room, np.int32) for room in rooms], asked.pad, left=False)
        readers[name] = fields | {PROBE: probe, KEPT: kept}
        held = [min(room, count) for room, count in zip(rooms, tokens, strict=True)]
        counts[name] = {**encoded.context_tokens[name], KEPT: held}
    return dataclasses.replace(encoded, readers=readers, context_tokens=counts)
