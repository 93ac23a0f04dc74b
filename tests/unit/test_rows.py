"""The control table of a random wire: rows that really differ, and sums that are what they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax import evaluate
from lw_jax.core.types import Example
from lw_jax.evals import rows
from lw_jax.recipes.latentwire import LatentWire
from sharding import placement
from tests import tiny

ROWS = ("text", "latents", "shuffled", "zero", "none", "truncated")
COUNT, BATCH = 7, 4  # the last batch is filled up
SAME = 1e-5  # nats; the same program on the same numbers
APART = 1e-3


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(recipe, weights, encoded, records) of one reader."""
    root = tmp_path_factory.getbasetemp() / "readers"
    cfg = tiny.make_config(root)
    cfg = dataclasses.replace(cfg, llms={"qwen": cfg.llms["qwen"]})
    recipe = LatentWire(cfg, placement.place("single", {"qwen": 1}))
    built = recipe.build()
    encoded = recipe.data("validation", rows=ROWS)
    records = list(
        rows.measure(
            evaluate.predict(recipe),
            (built.trainable, built.frozen),
            encoded,
            asked=dataclasses.replace(cfg.eval, examples=COUNT, batch=BATCH, rows=ROWS, max_new_tokens=3),
            decode={name: tokenizer.decode for name, tokenizer in recipe.tokenizers.items()},
            place=lambda tree, _: jax.tree.map(jnp.asarray, tree),
        )
    )
    return recipe, built, encoded, records


def of_row(records, row, key="nll"):
    return np.asarray([record[key] for record in records if record["row"] == row])


def test_every_example_is_measured_once_in_each_row(measured):
    *_, encoded, records = measured
    assert len(records) == COUNT * len(ROWS)
    ids = [record["id"] for record in records if record["row"] == "text"]
    assert len(set(ids)) == COUNT
    by_id = {example.id: example for example in encoded.examples}
    for record in records:
        assert record["question"] == by_id[record["id"]].question
        assert record["answers"] == list(by_id[record["id"]].answers)
        assert record["tokens"] >= 2 and 0 <= record["hits"] <= record["tokens"] and record["first"] in (0, 1)


@pytest.mark.parametrize("one", ROWS)
def test_rows_of_a_random_wire_really_differ(measured, one):
    *_, records = measured
    for other in ROWS:
        if other != one:
            apart = np.abs(of_row(records, one) - of_row(records, other)) > APART
            assert apart.all(), (one, other)


def test_shuffled_row_reads_the_other_example_s_latents(measured):
    recipe, built, encoded, records = measured
    index = {example.id: position for position, example in enumerate(encoded.examples)}
    chosen = [index[record["id"]] for record in records if record["row"] == "text"][:BATCH]
    others = rows.other_examples(encoded)
    batch = jax.tree.map(jnp.asarray, encoded.collate(chosen))
    sent = jax.tree.map(jnp.asarray, encoded.source.collate([others[i] for i in chosen]))
    fields, params = batch["readers"]["qwen"], built.frozen["qwen"]
    edges = {key: fields[key] for key in ("before", "after")}
    latents = recipe.encode(built.trainable, sent)
    prompt = recipe.prompt_from_latents(built.trainable, params, edges, latents, "qwen")
    answer = {key: fields[key] for key in ("answer_inputs", "targets", "weights")}
    expected = recipe.score(params, prompt, answer, "qwen")["nll"]
    np.testing.assert_allclose(of_row(records, "shuffled")[:BATCH], expected, atol=SAME)


def test_zero_row_knows_nothing_of_the_text(measured):
    recipe, built, encoded, _ = measured
    latents = jnp.zeros((2, recipe.cfg.encoder.slots, recipe.cfg.encoder.width))
    prefix = recipe.wire.prefix(built.trainable["adapters"]["qwen"], "qwen", latents)
    np.testing.assert_array_equal(prefix[0], prefix[1])


@dataclasses.dataclass
class Contexts:
    examples: tuple


def contexts(*names):
    return Contexts(tuple(Example(str(i), name, "?", ("a",)) for i, name in enumerate(names)))


def test_other_example_has_another_context_wherever_there_is_one(measured):
    assert rows.other_examples(contexts("a", "a", "b", "b", "b", "c")) == [2, 2, 5, 5, 5, 0]
    assert rows.other_examples(contexts("a", "b", "a")) == [1, 2, 1]
    assert rows.other_examples(contexts("a", "a")) == [0, 1]
    encoded = measured[2]
    for mine, other in enumerate(rows.other_examples(encoded)):
        assert encoded.examples[mine].context != encoded.examples[other].context


def record(row, **values):
    base = {"reader": "r", "row": row, "prediction": "x", "em": 0.0, "f1": 0.0}
    return base | {"nll": 1.0, "hits": 1.0, "first": 0.0, "tokens": 2.0} | values


def test_summary_weighs_likelihood_by_tokens_and_scores_by_examples():
    found = rows.summarise(
        [
            record("text", nll=9.0, tokens=3.0, hits=3.0, em=1.0, f1=1.0, first=1.0, prediction="y"),
            record("text", nll=1.0, tokens=7.0, hits=1.0, f1=0.5),
            record("text", nll=0.0, tokens=2.0, hits=0.0),
            record("none", nll=4.0, tokens=2.0),
        ]
    )
    text = found["r"]["text"]
    assert text["nll"] == pytest.approx(10 / 12)
    assert text["accuracy"] == pytest.approx(4 / 12)
    assert (text["em"], text["f1"], text["first_token"]) == pytest.approx((1 / 3, 0.5, 1 / 3))
    assert text["distinct"] == pytest.approx(2 / 3)
    assert (text["examples"], text["tokens"]) == (3, 12)
    assert found["r"]["none"]["nll"] == 2.0


def test_table_has_a_line_for_each_reader_and_row(measured):
    lines = rows.table(rows.summarise(measured[-1])).splitlines()
    assert lines[0].split() == ["reader", "row", "em", "f1", "nll", "accuracy", "first_token", "distinct"]
    assert [line.split()[:2] for line in lines[1:]] == [["qwen", row] for row in ROWS]
    shown = float(lines[1].split()[4])
    assert shown == pytest.approx(rows.summarise(measured[-1])["qwen"]["text"]["nll"], abs=5e-4)
    assert len({len(line) for line in lines}) == 1
