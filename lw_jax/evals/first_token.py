"""Time to the first token of an answer: a reader's pass over its prompt, made of the text or of a message."""

import dataclasses
import time

import jax
import numpy as np

from lw_jax.core.eval_rows import MESSAGES, ROWS
from lw_jax.data import batches
from lw_jax.data.batches import Encoded
from lw_jax.evals.comparison import UPPER
from lw_jax.evals.control_rows import Bench, Measured

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one reader, by row, and the tokens of the text that was read."""

    seconds: dict[str, float]
    tokens: int


def measure(bench: Bench, measured: Measured, *, rows: tuple[str, ...], copies: int) -> dict[str, Times]:
    """Returns each reader's times for the question with the text of median length; empty without both rows.

    One question alone, repeated `copies` times where the data axis needs it; the fastest of REPEATS passes after one
    that compiles. The message's time has the adapter, not the encoder, which another machine runs.
    """
    text = next((row for row in reversed(UPPER) if row in rows), None)
    message = next((row for row in MESSAGES if row in rows), None)
    if text is None or message is None:
        return {}
    found = {}
    for name in measured.encoded.readers:
        lengths = [measured.encoded.context_tokens[name][ROWS[text].fields[0]][index] for index in measured.indices]
        position = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
        one = _narrow(measured.encoded, measured.indices[position])
        fields = bench.place(one.collate([0] * copies)["readers"][name], name)
        slots = int(one.count_slots([0])[0])  # a reader is given no position beyond them
        latents = bench.place(np.repeat(measured.latents[position : position + 1, :slots], copies, axis=0), None)
        seconds = {}
        for row in (text, message):
            sent = latents if ROWS[row].latents else None

            def read(name: str = name, fields: dict = fields, row: str = row, sent: jax.Array | None = sent) -> None:
                prompt = bench.prompt(fields, name, row=row, latents=sent)
                jax.block_until_ready(bench.functions.begin(bench.frozen[name], prompt, name, 1))

            seconds[row] = _fastest(read)
        found[name] = Times(seconds, lengths[position])
    return found


def _fastest(run) -> float:
    run()  # compiles
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _narrow(encoded: Encoded, index: int) -> Encoded:
    """Returns one example as a data set, its fields no wider than it needs."""
    readers = {
        name: {key: batches.field([field.ids[index]], field.pad, left=field.left) for key, field in fields.items()}
        for name, fields in encoded.readers.items()
    }
    source = dataclasses.replace(encoded.source, ids=[encoded.source.ids[index]])
    return dataclasses.replace(encoded, examples=(encoded.examples[index],), source=source, readers=readers)
