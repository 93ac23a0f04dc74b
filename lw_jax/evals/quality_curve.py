"""Quality of answers against bytes on the wire: real messages of every size asked for, beside the text's own codings.

Nothing is simulated: the encoder writes latents of so many slots and values, the codec packs them into a message with
so many bits a value, readers read what comes out of it.
"""

import csv
import gzip
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import brotli
import jax
import numpy as np
import zstandard

from lw_jax.core import config
from lw_jax.core.config_sections import BITS
from lw_jax.core.types import EXACT
from lw_jax.data.batches import Encoded
from lw_jax.data.examples import spread
from lw_jax.evals import control_rows
from lw_jax.evals.control_rows import Bench, Measured, Record
from lw_jax.evals.statistics import Bootstrap
from lw_jax.models import codec
from lw_jax.report.figures import COLUMNS, REFERENCES, Curve


def sweep(bench: Bench, measured: Measured, *, asked: config.Eval, sent: config.AnswerStage, encoder: str, seed: int) -> Curve:
    """Returns the curve over `sent.slots` x `sent.widths` x BITS; `encoder` is the fingerprint that messages carry."""
    positions = spread(len(measured.indices), asked.curve_examples)
    indices = [measured.indices[position] for position in positions]
    _, slots, width = measured.latents.shape
    bootstrap = Bootstrap(len(indices), seed=seed)
    points = []
    for channel in itertools.product(sent.slots or (slots,), sent.widths or (width,)):
        found: dict[int, list[Record]] = {}
        for bits, framed, record in _send(bench, measured.encoded, indices, channel, asked=asked, encoder=encoder):
            found.setdefault(bits, []).append(record | {"framed_bytes": framed})
        for bits, records in found.items():
            points += _points((*channel, bits), records, bootstrap)
    kept = set(indices)
    reference = [r for r in measured.records if r["row"] in REFERENCES and r["index"] in kept]
    return Curve(
        quality=asked.curve,
        examples=len(indices),
        points=points,
        references=control_rows.summarise(reference, seed=seed),
        text_bytes=measure_texts(measured.encoded.examples[index].context for index in indices),
    )


def measure_texts(texts: Iterable[str]) -> dict[str, float]:
    """Returns the mean bytes of a text, each coded by itself: plain, and by each compressor at its strongest."""
    zstd = zstandard.ZstdCompressor(level=22)
    sizes = []
    for text in texts:
        raw = text.encode()
        coded = (raw, gzip.compress(raw, 9, mtime=0), zstd.compress(raw), brotli.compress(raw, quality=11))
        sizes.append([len(one) for one in coded])
    return dict(zip(("UTF-8", "gzip", "zstd", "brotli"), np.mean(sizes, axis=0).tolist(), strict=True))


def write_csv(curve: Curve, path: Path) -> None:
    """Writes a row for each point."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(curve.points)


def table(curve: Curve) -> str:
    """Returns the points for a terminal, a line for each size with every reader's figure, and the texts' sizes."""
    readers = list(dict.fromkeys(point["reader"] for point in curve.points))
    sizes = {"slots": 7, "width": 7, "bits": 6, "payload": 9, "framed": 8}
    heads = [f"{name} {curve.quality}" for name in readers]
    lines = ["".join(f"{name:>{size}}" for name, size in sizes.items()) + "".join(f"{head:>18}" for head in heads)]
    for (slots, width, bits), points in _by_size(curve.points).items():
        first = points[0]
        numbers = (slots, width, bits, first["payload_bytes"], round(first["framed_bytes"]))
        line = "".join(f"{number:>{size}}" for number, size in zip(numbers, sizes.values(), strict=True))
        lines.append(line + "".join(f"{point[curve.quality]:>18.3f}" for point in points))
    text = ", ".join(f"{name} {size:.0f}" for name, size in curve.text_bytes.items())
    return "\n".join([*lines, f"the same {curve.examples} contexts as text, mean bytes: {text}"])


def _by_size(points: Sequence[dict[str, Any]]) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for point in points:
        found.setdefault((point["slots"], point["width"], point["bits"]), []).append(point)
    return found


def _send(
    bench: Bench,
    encoded: Encoded,
    indices: Sequence[int],
    channel: tuple[int, int],
    *,
    asked: config.Eval,
    encoder: str,
) -> Iterator[tuple[int, int, Record]]:
    """Yields (bits, framed bytes, record) for each example and reader, of messages that were packed and read back."""
    for start in range(0, len(indices), asked.batch):
        real = list(indices[start : start + asked.batch])
        # The encoder must not quantise: here it is the codec that does.
        told = np.tile(np.array([*channel, EXACT], np.int32), (asked.batch, 1))
        host = encoded.collate(real + real[-1:] * (asked.batch - len(real)), rows=(), channel=told)
        source = bench.place(host["source"], None)
        latents = np.asarray(jax.device_get(bench.predict.encode(bench.trainable, source)), np.float32)
        placed = {name: bench.place(fields, name) for name, fields in host["readers"].items()}
        for bits in BITS:
            received, sizes = _round_trip(latents, channel, bits=bits, encoder=encoder)
            for name, fields in placed.items():
                prompt = bench.prompt(fields, name, row="latents", latents=bench.place(received, None))
                scores = bench.score(fields, name, prompt)
                said = bench.say(name, prompt, max_new_tokens=asked.max_new_tokens) if asked.curve == "f1" else None
                for position, index in enumerate(real):
                    record = {key: float(value[position]) for key, value in scores.items()}
                    if said is not None:
                        record |= control_rows.judge(encoded.examples[index], said[position])
                    yield bits, sizes[position], {"reader": name, "row": "latents", "index": index} | record


def _round_trip(
    latents: np.ndarray, channel: tuple[int, int], *, bits: int, encoder: str
) -> tuple[np.ndarray, list[int]]:
    """Returns the latents [b m z] that arrive, zeros where nothing was sent, and each message's bytes."""
    slots, width = channel
    received, sizes = np.zeros_like(latents), []
    for one, sent in zip(received, latents, strict=True):
        message = codec.pack(sent[:slots, :width], bits=bits, encoder=encoder)
        one[:slots, :width] = codec.unpack(message, encoder=encoder)
        sizes.append(len(message))
    return received, sizes


def _points(size: tuple[int, int, int], records: Sequence[Record], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Returns each reader's figures at one size of message."""
    slots, width, bits = size
    points = []
    for reader in dict.fromkeys(record["reader"] for record in records):
        own = [record for record in records if record["reader"] == reader]
        estimates = control_rows.estimate(own, bootstrap)
        point: dict[str, Any] = {"slots": slots, "width": width, "bits": bits, "reader": reader, "examples": len(own)}
        point["payload_bytes"] = -(-slots * width * bits // 8)  # the values alone
        point["framed_bytes"] = float(np.mean([record["framed_bytes"] for record in own]))
        point |= {key: estimates[key].value for key in ("nll", "accuracy", "em", "f1") if key in estimates}
        for key in ("nll", "f1"):
            if key in estimates:
                bounds = estimates[key].interval() or (None, None)
                point |= dict(zip((f"{key}_low", f"{key}_high"), bounds, strict=True))
        points.append(point)
    return points
