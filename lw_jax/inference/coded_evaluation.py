"""Evaluation rows of a wire of kind "cache", and the bytes of its messages."""

from collections.abc import Callable

import numpy as np

from lw_jax.core.eval_rows import KNOWN_TO_CACHE, OF_CACHE
from lw_jax.data.batches import one_context
from lw_jax.data.examples import spread
from lw_jax.evals import cache_rows
from lw_jax.evals.comparison import Record
from lw_jax.evals.control_rows import Measured
from lw_jax.inference.coded_wire import CodedWire


def measure(wire: CodedWire, *, batch: int, say: Callable[[str], None]) -> Measured:
    """Returns one record per example, reader and row; those of the row "latents" with their message's bytes."""
    recipe, options = wire.recipe, wire.recipe.cfg.eval
    encoded = recipe.encode(recipe.examples("validation"))
    say("held-out data: " + "\n".join(encoded.describe()))
    rows = _rows(options.rows, several=not one_context(encoded.examples), say=say)
    indices = spread(len(encoded), options.examples)
    records = cache_rows.measure(
        recipe.bench(wire.codes, wire.frozen, wire.functions),
        encoded,
        indices,
        rows=rows,
        batch=batch,
        max_new_tokens=options.max_new_tokens,
        codings=wire.codings,
    )
    return Measured(encoded, indices, np.zeros((len(indices), 0, 0), np.float32), records)


def _rows(named: tuple[str, ...], *, several: bool, say: Callable[[str], None]) -> list[str]:
    """Returns the rows that this kind has of those named, with all of its own where none of them is named."""
    rows = [row for row in named if row in KNOWN_TO_CACHE and (several or row != "shuffled")]
    if left := [row for row in named if row not in rows]:
        say(f"left out: {', '.join(left)}: rows of trained latents, or of a second text where there is one alone")
    return rows if set(rows) & set(OF_CACHE) else [*rows, *OF_CACHE]


def bytes_a_token(records: list[Record], name: str) -> float | None:
    """Returns the bytes of a reader's messages by the tokens of their texts; None where none was measured."""
    own = [one for one in records if one["reader"] == name and "bytes" in one]
    return sum(one["bytes"] for one in own) / sum(one["text_tokens"] for one in own) if own else None
