"""The byte curve: real messages of every size, beside the real codings of the same texts."""

import csv
import dataclasses
import gzip
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.evals import comparison, control_rows, quality_curve
from lw_jax.models import codec
from lw_jax.report import figures
from tests import tiny

COUNT, BATCH, PART = 7, 2, 3  # of PART examples the last batch is filled up
ENCODER = "0123456789abcdef"
ROWS = ("text", "latents", "none")
HALF = 2e-2  # nats; fp16 latents against fp32 ones
APART = 1e-3


@pytest.fixture(scope="module")
def wire(root):
    """(bench, (options, stage), what was measured) of one reader."""
    recipe = tiny.make_recipe(root, only="qwen")
    bench = tiny.make_bench(recipe, recipe.build(), tiny.Recorder)
    changes = {"examples": COUNT, "batch": BATCH, "rows": ROWS, "max_new_tokens": 2}
    options = dataclasses.replace(recipe.cfg.eval, **changes, curve="nll", curve_examples=PART)
    measured = control_rows.measure(bench, recipe.data("validation", rows=ROWS), options=options)
    return bench, (options, recipe.cfg.stages.answer), measured


def sweep(wire, *, bits=(16, 8, 2), curve="nll", **sizes):
    bench, (options, stage), measured = wire
    bench.functions.seen.clear()
    options, sent = dataclasses.replace(options, curve=curve), dataclasses.replace(stage, **sizes)
    with pytest.MonkeyPatch.context() as patch:  # fewer than all are enough
        patch.setattr(quality_curve, "BITS", bits)
        return quality_curve.sweep(bench, measured, options=options, sent=sent, seed=0)


@pytest.fixture(scope="module")
def found(wire):
    return sweep(wire)


def test_there_is_a_point_for_each_size_and_reader_with_the_bytes_of_its_message(wire, found):
    _, slots, width = wire[-1].latents.shape
    sizes = [(p["slots"], p["width"], p["bits"], p["reader"]) for p in found.points]
    assert sizes == [(slots, width, bits, "qwen") for bits in (16, 8, 2)]
    for point in found.points:
        assert point["framed_bytes"] == codec.framed_bytes(slots, width, point["bits"])
        assert point["payload_bytes"] == math.ceil(slots * width * point["bits"] / 8)
        assert point["examples"] == found.examples == PART
        assert point["nll_low"] <= point["nll"] <= point["nll_high"]


def test_sixteen_bits_cost_nothing_and_two_bits_something(wire, found):
    measured = wire[-1]
    part = {measured.indices[i] for i in (0, 2, 4)}
    records = [record for record in measured.records if record["index"] in part]
    latents = {name: row["latents"]["nll"] for name, row in comparison.summarise(records, seed=0).items()}
    for point in found.points:
        error = abs(point["nll"] - latents[point["reader"]])
        assert error < HALF if point["bits"] == 16 else True
        assert error > APART if point["bits"] == 2 else True


def test_references_are_the_rows_of_the_same_examples(wire, found):
    measured = wire[-1]
    for row in ("text", "none"):
        own = [r for r in measured.of("qwen", row) if r["index"] in {measured.indices[i] for i in (0, 2, 4)}]
        assert found.references["qwen"][row]["nll"] == pytest.approx(
            sum(r["nll"] for r in own) / sum(r["tokens"] for r in own)
        )
    assert found.references["qwen"].keys() == {"text", "none"}


def test_readers_read_what_came_out_of_the_message_and_are_told_its_size(wire):
    bench, _, measured = wire
    found = sweep(wire, slots=(2, 5), widths=(8, 24), bits=(2,))
    assert {(p["slots"], p["width"]) for p in found.points} == {(2, 8), (2, 24), (5, 8), (5, 24)}
    batches = [measured.indices[0:3:2], [measured.indices[4]] * 2]
    expected = [(*size, batch) for size in itertools.product((2, 5), (8, 24)) for batch in batches]
    for (slots, width, batch), (channel, latents) in zip(expected, bench.functions.seen, strict=True):
        np.testing.assert_array_equal(channel, [[slots, width, 16]] * BATCH)
        source = jax.tree.map(jnp.asarray, measured.encoded.collate(batch)["source"])
        sent = bench.functions.encode(bench.trainable, source | {"channel": jnp.asarray(channel)})
        for one, arrived in zip(np.asarray(sent), latents, strict=True):
            message = codec.pack(one[:slots, :width], bits=2, encoder=ENCODER)
            np.testing.assert_allclose(arrived[:slots, :width], codec.unpack(message, encoder=ENCODER), atol=1e-5)
            assert not arrived[slots:].any() and not arrived[:, width:].any()


def test_answers_are_generated_only_for_a_curve_of_f1(wire, found):
    assert not any("f1" in point or "em" in point for point in found.points)
    spoken = sweep(wire, curve="f1", bits=(16,))
    for point in spoken.points:
        assert 0 <= point["em"] <= point["f1"] <= 1 and point["f1_low"] <= point["f1"] <= point["f1_high"]
        same = next(p for p in found.points if p["bits"] == 16)
        assert point["nll"] == pytest.approx(same["nll"], abs=1e-5)


def test_csv_and_picture_have_every_point_and_texts_are_coded_one_by_one(wire, found, tmp_path):
    quality_curve.write_csv(found, tmp_path / "bytes.csv")
    with (tmp_path / "bytes.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == quality_curve.COLUMNS and len(lines) == len(found.points)
    for line, point in zip(lines, found.points, strict=True):
        assert float(line["nll"]) == point["nll"] and line["reader"] == point["reader"]
        assert float(line["framed_bytes"]) == point["framed_bytes"] and line["f1"] == ""
    figure = figures.draw_curve(found)
    (panel,) = figure.axes
    drawn = [line.get_xydata() for line in panel.get_lines() if line.get_label() == "5 slots x 24"]
    np.testing.assert_allclose(drawn[0], sorted((p["framed_bytes"], p["nll"]) for p in found.points))
    measured = wire[-1]
    texts = [measured.encoded.examples[measured.indices[i]].context.encode() for i in (0, 2, 4)]
    assert found.text_bytes["UTF-8"] == np.mean([len(text) for text in texts])
    assert found.text_bytes["gzip"] == np.mean([len(gzip.compress(text, 9)) for text in texts])


def test_columns_on_a_terminal_stand_apart_and_under_their_readers(found):
    names = ["a_reader_with_a_long_name", "another_one_that_is_longer"]
    points = [point | {"reader": name} for point in found.points for name in names]
    head, *lines = quality_curve.table(dataclasses.replace(found, points=points)).splitlines()[:-1]
    ends = [head.index(name) + len(name) + len(" nll") for name in names]
    assert head.split()[-4:] == [names[0], "nll", names[1], "nll"]
    assert len(lines) == 3 and all(line[end - 4] == "." and len(line) == ends[1] for line in lines for end in ends)
