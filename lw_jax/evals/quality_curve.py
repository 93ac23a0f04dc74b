"""Byte curve: quality of answers by message size, beside the compressed text's own bytes.

Nothing is simulated: the encoder writes latents of the given slots and width, the codec packs them at the given bits a
value, and readers read the unpacked message.
"""

import csv
import dataclasses
import gzip
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import brotli
import numpy as np
import zstandard

from lw_jax.core import config, processes
from lw_jax.core.config_sections import BITS
from lw_jax.core.eval_rows import PROMPT_FIELDS
from lw_jax.core.progress import phase
from lw_jax.data.batches import Encoded
from lw_jax.data.examples import spread
from lw_jax.data.loader import batches_of
from lw_jax.evals import comparison, control_rows
from lw_jax.evals.comparison import Record
from lw_jax.evals.control_rows import Measured, WireSession
from lw_jax.evals.results import COLUMNS, REFERENCE_ROWS, Curve
from lw_jax.evals.selection import Scored
from lw_jax.evals.statistics import Bootstrap
from lw_jax.models import codec

ROW = "latents"
ENCODER = "0" * 16  # the fingerprint that messages carry here: it changes neither their size nor what is read
SIZE = ("slots", "width", "bits", "ratio")  # of a message


def sweep(
    bench: WireSession, measured: Measured, *, options: config.Eval, sent: config.AnswerStage, seed: int
) -> Curve:
    """Returns the curve over `sent.slots` or `sent.ratios` x `sent.widths` x BITS."""
    indices = _indices(measured, options)
    bootstrap = Bootstrap(texts_of(measured, options), seed=seed)
    points, sizes = [], _sizes(measured, sent)
    total = -(-len(indices) // options.batch) * len(BITS) * len(measured.encoded.readers)
    for number, size in enumerate(sizes, 1):
        by_bits: dict[int, list[Record]] = {}
        sending = _send(bench, size, indices, options=options)
        what = "measuring quality by message size" + (f", {number} of {len(sizes)} sizes" if len(sizes) > 1 else "")
        with phase(what, total, "batches") as done:
            groups = list(done.track(sending))
        for bits, record in control_rows.merge(groups):
            by_bits.setdefault(bits, []).append(record)
        for bits, records in by_bits.items():
            points += _points(size, bits, records, bootstrap)
    chosen = set(indices)
    reference = [r for r in measured.records if r["row"] in REFERENCE_ROWS and r["index"] in chosen]
    return Curve(
        quality=cast(Any, options.curve),  # validation checks it
        examples=len(indices),
        points=points,
        references=cast(Any, comparison.summarise(reference, seed=seed)),
        text_bytes=measure_texts(texts_of(measured, options)),
    )


def _sizes(measured: Measured, sent: config.AnswerStage) -> list[Encoded]:
    """Returns the data set for each size of messages: their slots, or at a ratio as many as their texts need."""
    readers = {
        name: {key: field for key, field in fields.items() if key not in PROMPT_FIELDS}
        for name, fields in measured.encoded.readers.items()
    }
    _, most, whole = measured.latents.shape
    ratios = sent.ratios or (() if sent.slots else (measured.encoded.ratio,))
    slots = [(count, 0) for count in sent.slots] + [(most, ratio) for ratio in ratios]
    return [
        dataclasses.replace(measured.encoded, readers=readers, slots=count, width=width, ratio=ratio)
        for (count, ratio), width in itertools.product(slots, sent.widths or (whole,))
    ]


def texts_of(measured: Measured, options: config.Eval) -> list[str]:
    return [measured.encoded.examples[index].context for index in _indices(measured, options)]


def _indices(measured: Measured, options: config.Eval) -> list[int]:
    return [measured.indices[position] for position in spread(len(measured.indices), options.curve_examples)]


def model_bytes(texts: Sequence[str], scored: Sequence[Scored]) -> float | None:
    """Returns the mean bytes of the texts in an arithmetic code with a language model's probabilities.

    That is NLL / ln 2 / 8, without the text's length, which the other codings hold too. None where a text was scored
    in part only.
    """
    if not all(len(score.spans) and score.spans[-1, 1] >= len(text) for text, score in zip(texts, scored, strict=True)):
        return None
    return float(np.mean([score.values.sum(dtype=np.float64) / math.log(2) / 8 for score in scored]))


def measure_texts(texts: Iterable[str]) -> dict[str, float]:
    """Returns the mean bytes of a text, each coded by itself: plain and by each compressor at its highest level."""
    zstd = zstandard.ZstdCompressor(level=22)
    sizes = []
    for text in texts:
        raw = text.encode()
        coded = (raw, gzip.compress(raw, 9, mtime=0), zstd.compress(raw), brotli.compress(raw, quality=11))
        sizes.append([len(data) for data in coded])
    return dict(zip(("UTF-8", "gzip", "zstd", "brotli"), np.mean(sizes, axis=0).tolist(), strict=True))


def write_csv(curve: Curve, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(curve.points)


def table(curve: Curve) -> str:
    """Returns the points for a terminal, a line for each size with every reader's figure, and the texts' sizes."""
    readers = list(dict.fromkeys(point["reader"] for point in curve.points))
    sizes = {"slots": 7, "width": 7, "bits": 6, "payload": 9, "framed": 8}
    heads = [f"{name} {curve.quality}" for name in readers]
    wide = [max(18, len(head) + 2) for head in heads]
    head = "".join(f"{head:>{size}}" for head, size in zip(heads, wide, strict=True))
    lines = ["".join(f"{name:>{size}}" for name, size in sizes.items()) + head]
    for _, group in itertools.groupby(curve.points, lambda point: [point.get(name) for name in SIZE]):
        points: list[Any] = list(group)  # of all readers
        first = points[0]
        numbers = (first["slots"], first["width"], first["bits"], first["payload_bytes"], round(first["framed_bytes"]))
        line = "".join(f"{number:>{size}}" for number, size in zip(numbers, sizes.values(), strict=True))
        figures = [f"{point[curve.quality]:>{size}.3f}" for point, size in zip(points, wide, strict=True)]
        lines.append("".join([line, *figures]))
    text = ", ".join(f"{name} {size:.0f}" for name, size in curve.text_bytes.items())
    return "\n".join([*lines, f"the same {curve.examples} contexts as text, mean bytes: {text}"])


def _send(
    bench: WireSession, sized: Encoded, indices: Sequence[int], *, options: config.Eval
) -> Iterator[list[tuple[int, Record]]]:
    """Yields, for each batch, bits and reader, (bits, record) of this process's examples.

    The messages are packed and unpacked; the encoder must not quantise them before.
    """
    functions, texts = bench.functions, control_rows.number_texts(sized)
    for host in batches_of(sized, indices, options.batch, share=processes.share()):
        channel, latents = host["source"]["channel"], bench.encode(host["source"])
        placed = {name: functions.place(fields, name) for name, fields in host["readers"].items()}
        real = np.flatnonzero(host["valid"])
        for bits in BITS:
            received, framed = _round_trip(latents, channel, bits=bits)
            for name, fields in placed.items():
                prompt = bench.prompt(fields, name, row=ROW, latents=functions.place(received, None))
                if options.curve == "f1":
                    outputs = bench.answer(fields, name, prompt, max_new_tokens=options.max_new_tokens)
                else:
                    outputs = None, bench.score(fields, name, prompt)
                records = control_rows.records_of(sized, host, name, ROW, outputs, channel[:, 0] + 1, texts)
                sizes = [{"slots": int(channel[place, 0]), "framed_bytes": framed[place]} for place in real]
                yield [(bits, record | size) for record, size in zip(records, sizes, strict=True)]


def _round_trip(latents: np.ndarray, channel: np.ndarray, *, bits: int) -> tuple[np.ndarray, list[int]]:
    """Returns the received latents [b m z], zeros beyond each one's `channel` i32[b 3], and each message's bytes."""
    received, sizes = np.zeros_like(latents), []
    for out, sent, (slots, width, _) in zip(received, latents, channel, strict=True):
        message = codec.pack(sent[:slots, :width], bits=bits, encoder=ENCODER)
        out[:slots, :width] = codec.unpack(message, encoder=ENCODER)
        sizes.append(len(message))
    return received, sizes


def _points(size: Encoded, bits: int, records: Sequence[Record], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Returns each reader's figures at one message size; by `ratio` its slots and bytes are means."""
    points = []
    for reader in dict.fromkeys(record["reader"] for record in records):
        group = [record for record in records if record["reader"] == reader]
        estimates = comparison.estimate(group, bootstrap)
        slots = [record["slots"] for record in group]
        payload = [-(-count * size.width * bits // 8) for count in slots]  # the values alone
        point: dict[str, Any] = {"slots": size.slots, "width": size.width, "bits": bits, "reader": reader}
        point |= {"examples": len(group), "payload_bytes": round(float(np.mean(payload)))}
        if size.ratio:
            point |= {"slots": round(float(np.mean(slots)), 2), "ratio": size.ratio}
        point |= {key: float(np.mean([record[key] for record in group])) for key in ("framed_bytes", "positions")}
        point |= {key: estimates[key].value for key in ("nll", "accuracy", "em", "f1") if key in estimates}
        for key in ("nll", "f1"):
            if key in estimates:
                bounds = estimates[key].interval() or (None, None)
                point |= dict(zip((f"{key}_low", f"{key}_high"), bounds, strict=True))
        points.append(point)
    return points
