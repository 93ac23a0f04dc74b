"""Evaluation rows of a wire of kind "cache", and the bytes of its messages."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from lw_jax.core.eval_rows import KNOWN_TO_CACHE, OF_CACHE, ROWS
from lw_jax.core.progress import phase, say
from lw_jax.core.types import Example
from lw_jax.data.batches import Encoded, one_context
from lw_jax.data.examples import spread
from lw_jax.evals import cache_rows, swaps
from lw_jax.evals.comparison import Record
from lw_jax.evals.control_rows import Measured, describe_measured, follow
from lw_jax.evals.first_token import Times, fastest, median_text, place_alone
from lw_jax.inference.coded_wire import CodedWire
from lw_jax.inference.evaluation_log import open_log
from lw_jax.models import decoder
from lw_jax.models.wire import Prompt


def measure(
    wire: CodedWire,
    *,
    batch: int,
    folder: Path | None = None,
    taught: Mapping[str, jax.Array] = {},
) -> Measured:
    """Returns one record per example, reader and row; those at the wire's ratio with their message's bytes.

    `taught` has each reader's vectors for the rows that need them, see `taught_text.teach`.
    With a folder records are kept there as they are made, and those of the same evaluation are not measured again: see
    `evaluation_log`.
    """
    recipe, options = wire.recipe, wire.recipe.cfg.eval
    with phase("reading and tokenising the held-out data"):
        encoded = recipe.encode(recipe.questions("validation", least=options.examples))
    say("held-out data: " + "\n".join([*encoded.describe(), *describe_measured(encoded, options)]))
    rows = _rows(options.rows, several=not one_context(encoded.examples))
    indices, ratio = spread(len(encoded), options.examples), wire.ratio or recipe.cfg.encoder.ratio
    bench = cache_rows.CacheSession(wire.functions, wire.frozen, recipe.tokenizers, wire.codes, ratio, taught=taught)
    _check_positions(wire, encoded, indices, rows)
    swapped, changed = None, [row for row in rows if ROWS[row].swapped]
    if changed:
        swapped = swaps.make(encoded, indices, layout=recipe.layout, fields=cache_rows.FIELDS)
        swapped = dataclasses.replace(swapped, encoded=cache_rows.attach(swapped.encoded, recipe.layout))
        say(swapped.describe(changed, len(indices)))
        _check_positions(wire, swapped.encoded, range(len(swapped.origins)), rows)
    log = open_log(recipe, lambda: f"{wire.fingerprint} {wire.ratio}", encoded, folder, taught=taught)

    def run(encoded: Encoded, indices: Sequence[int], rows: Sequence[str]) -> list[Record]:
        settings = {"batch": batch, "max_new_tokens": options.max_new_tokens}
        return cache_rows.measure(bench, encoded, indices, rows=rows, log=log, **settings)

    records = run(encoded, indices, [row for row in rows if not ROWS[row].swapped])
    if swapped is not None:
        records += follow(run(swapped.encoded, range(len(swapped.origins)), changed), swapped, encoded)
    return Measured(encoded, indices, np.zeros((len(indices), 0, 0), np.float32), records)


def _check_positions(wire: CodedWire, encoded: Encoded, indices: Sequence[int], rows: Sequence[str]) -> None:
    """Refuses texts that have more positions, read twice or with question and answer, than a reader was trained on."""
    cfg = wire.recipe.cfg
    taught = any(ROWS[row].taught for row in rows)
    for name, reader in wire.recipe.wire.readers.items():
        fields = encoded.readers[name]
        longest = {key: max((len(field.ids[index]) for index in indices), default=0) for key, field in fields.items()}
        before, text = longest["before"], max(longest["own"], longest["other"] * ("shuffled" in rows))
        prompt = max(longest["text"], before + text + longest["after"] + taught)
        answer = max(longest["answer"] - 1, cfg.eval.max_new_tokens)  # EOS is no input
        decoder.check_positions(
            reader.config,
            max(before + 2 * text + longest["again"], prompt + answer),
            what=f"reader {name!r}: the longest text, read twice or with its question and answer, takes",
            remedy=f"lower config.data.context_tokens={cfg.data.context_tokens:,} with data.overlong='drop' or 'cut', "
            "or choose another reader",
        )


def measure_times(wire: CodedWire, measured: Measured, name: str) -> tuple[Times, dict[str, float]]:
    """Returns a reader's times to the first token, and those to write and to open a message, as `first_token.measure`.

    A message is opened where its bytes are numbers, kept keys and biases again.
    """
    place, tokens = median_text(measured, name, "text")
    example, params, functions = measured.examples[place], wire.frozen[name], wire.functions
    text = what_is_read(wire, measured.encoded, measured.indices[place], name)
    write = functools.partial(wire.write, text, ratio=wire.ratio, readers=(name,))
    message = write()
    section, alone = wire.section(message, name), Example("timed", text.strip(), example.question, ())
    _, fields, opening = place_alone(functions, alone, name, layout=wire.text_layout(name), row="text")

    def begin(prompt: Prompt) -> None:
        jax.block_until_ready(functions.begin(params, prompt, name, 1))

    def read_text() -> None:
        prompt = functions.prompt_from_text(params, fields["text"])
        begin(functions.reuse_opening(params, fields["before"], prompt, name, **opening))

    first = {
        "text": fastest(read_text),
        "latents": fastest(lambda: begin(wire.prompt([section], [example.question], name))),
    }
    return Times(first, tokens), {
        "write_seconds": fastest(write),
        "open_seconds": fastest(lambda: wire.section(message, name)),
    }


def what_is_read(wire: CodedWire, encoded: Encoded, index: int, name: str) -> str:
    """Returns what the rows read of an example's text: under data.overlong="cut" it may be the beginning alone."""
    if wire.recipe.cfg.data.overlong != "cut":
        return encoded.examples[index].context
    return wire.recipe.tokenizers[name].decode(encoded.readers[name]["own"].ids[index])


def _rows(named: tuple[str, ...], *, several: bool) -> list[str]:
    """Returns the rows that this kind has of those named; of none of them, all of its own."""
    rows = [row for row in named if row in KNOWN_TO_CACHE and (several or row != "shuffled")]
    if left := [row for row in named if row not in rows]:
        say(f"left out: {', '.join(left)}: rows of trained latents, or of a second text where there is one alone")
    return rows or list(OF_CACHE)


def bytes_a_token(records: list[Record], name: str) -> float | None:
    """Returns the bytes of a reader's messages by the tokens of their texts; None where none was measured."""
    sized = [record for record in records if record["reader"] == name and "bytes" in record]
    return sum(record["bytes"] for record in sized) / sum(record["text_tokens"] for record in sized) if sized else None
