"""Time to the first token of an answer: a reader's pass over its prompt, made of the text or of a message."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from lw_jax.core.eval_rows import ROWS
from lw_jax.core.types import Example, Tree
from lw_jax.data import batches
from lw_jax.data.batches import Encoded, Field
from lw_jax.data.prompt_tokens import Layout
from lw_jax.evals.comparison import UPPER
from lw_jax.evals.control_rows import Measured, WireSession
from lw_jax.evals.wire_functions import WireFunctions

REPEATS = 5
LONG = 20.0  # seconds of runs behind which no other one begins


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one reader, by row, and the tokens of the text that was read."""

    seconds: dict[str, float]
    tokens: int


def measure(bench: WireSession, measured: Measured, layout: Layout, *, rows: tuple[str, ...]) -> dict[str, Times]:
    """Returns each reader's times for the question with the text of median length; empty without both rows.

    One question alone, repeated where the data axis needs it; the fastest of some passes after one
    that compiles (`fastest`). The message's time has the adapter, not the encoder, which another machine runs. Of a
    wire of keys and values the opening, the same before every text and message, is read beforehand for both.
    """
    text = next((row for row in reversed(UPPER) if row in rows), None)
    if text is None or "latents" not in rows:
        return {}
    times = {}
    for name in measured.encoded.readers:
        position, tokens = median_text(measured, name, ROWS[text].fields[0])
        example = measured.examples[position]
        single, fields, opening = place_alone(bench.functions, example, name, layout=layout, row=text)
        slots = int(single.count_slots([0])[0])  # a reader is given no position beyond them
        message = np.repeat(measured.latents[position : position + 1, :slots], bench.functions.placement.data, axis=0)
        latents = bench.functions.place(message, None)
        seconds = {
            text: fastest(functools.partial(_read, bench, fields, name, text, None, opening)),
            "latents": fastest(functools.partial(_read, bench, fields, name, "latents", latents, None)),
        }
        times[name] = Times(seconds, tokens)
    return times


def median_text(measured: Measured, name: str, field: str) -> tuple[int, int]:
    """Returns the position in `indices` of a reader's text of median length, and its tokens."""
    lengths = [measured.encoded.context_tokens[name][field][index] for index in measured.indices]
    position = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
    return position, lengths[position]


def place_alone(
    functions: WireFunctions, example: Example, name: str, *, layout: Layout, row: str
) -> tuple[Encoded, Tree, dict[str, int]]:
    """Returns an example encoded alone, no wider than it needs; its fields on a reader's mesh; what `match` finds.

    It is repeated where the data axis needs it. `row`: of the text.
    """
    single = batches.encode([example], layout=layout, rows=ROWS[row].fields)
    fields = functions.place(single.collate([0] * functions.placement.data)["readers"][name], name)
    return single, fields, match(single.readers[name]["before"], single.readers[name][ROWS[row].fields[0]])


def match(before: Field, text: Field) -> dict[str, int]:
    """Returns how far the common start of both fields' only rows, which are left-padded, reaches in each field."""
    pairs = zip(before.ids[0].tolist(), text.ids[0].tolist(), strict=False)
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    ends = {"columns": before, "skipped": text}
    return {key: field.width - len(field.ids[0]) + same for key, field in ends.items()}


def _read(
    bench: WireSession, fields: Mapping, name: str, row: str, latents: jax.Array | None, opening: dict | None
) -> None:
    prompt, params = bench.prompt(fields, name, row=row, latents=latents), bench.frozen[name]
    if opening is not None:
        prompt = bench.functions.reuse_opening(params, fields["before"], prompt, name, **opening)
    jax.block_until_ready(bench.functions.begin(params, prompt, name, 1))


def fastest(run: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of REPEATS runs, fewer where they are long, after one that compiles."""
    run()  # compiles
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < LONG:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
