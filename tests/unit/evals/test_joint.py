"""The joint pick of two random readers, held against scores that are taken candidate by candidate."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.data import batches
from lw_jax.evals import answers, control_rows, joint
from tests import tiny

COUNT, BATCH = 5, 3  # the last batch is filled up
SAME = 1e-4  # nats; other batch widths sum in another order
TOO_LONG = " ".join(["Lisbon"] * 30)  # beyond data.answer_tokens


@pytest.fixture(scope="module")
def wire(root):
    """(recipe, weights, bench, options, what was measured, the logits of an answer) of two readers."""
    recipe = tiny.make_recipe(root)
    built = recipe.build()
    changes = {"examples": COUNT, "batch": BATCH, "rows": ("latents",), "max_new_tokens": 2}
    options = dataclasses.replace(recipe.cfg.eval, **changes)
    bench = tiny.make_bench(recipe, built)
    measured = control_rows.measure(bench, recipe.data("validation"), options=options)
    return recipe, built, bench, options, measured, jax.jit(recipe.wire.answer_logits, static_argnames="name")


def pick(wire, said, **changes):
    """(figures, records by reader) where the readers had said these words: {reader: [answer of each example]}."""
    recipe, _, bench, options, measured, _ = wire
    options = dataclasses.replace(options, **changes)
    measured = dataclasses.replace(measured, records=copy.deepcopy(measured.records))
    for name, words in said.items():
        for record, word in zip(measured.of(name, "latents"), words, strict=True):
            example = measured.encoded.examples[record["index"]]
            record |= control_rows.judge(example, word)
    told = joint.pick(bench, measured, recipe.layout, options=options, seed=0)
    return told, {name: measured.of(name, "latents") for name in said}


def score(wire, position, answer):
    """Mean over readers of a candidate's NLL a token, each with its own latents; one candidate at a time."""
    recipe, built, bench, _, measured, answer_logits = wire
    latents = measured.latents[[position]]
    example = measured.encoded.examples[measured.indices[position]]
    batch = batches.encode([dataclasses.replace(example, answers=(answer,))], layout=recipe.layout).collate([0])
    batch = jax.tree.map(jnp.asarray, batch)
    found = []
    for name, fields in batch["readers"].items():
        wire_fields = {key: fields[key] for key in ("before", "after", "channel", "task")}
        prompt = bench.functions.prompt_from_latents(built.trainable, built.frozen[name], wire_fields, latents, name)
        logits = answer_logits(built.frozen[name], name, prompt, fields)
        logits = jax.nn.log_softmax(logits, axis=2)
        gold = jnp.take_along_axis(logits, fields["targets"][:, :, None], axis=2)[0, :, 0]
        real = np.asarray(fields["weights"][0]) > 0
        found.append(-np.mean(np.asarray(gold)[real]))
    return np.mean(found)


LLAMA = ["Lisbon", "a small red boat", "Oslo", "Mara Ellis", "yes"]
QWEN = ["the old baker of Rome", "Oslo", "violin", "no", "Tom Reed works"]


def test_the_candidate_that_is_likeliest_to_all_readers_is_picked(wire):
    told, records = pick(wire, {"llama": LLAMA, "qwen": QWEN})
    chosen = []
    for position in range(COUNT):
        costs = [score(wire, position, words[position]) for words in (LLAMA, QWEN)]
        for name, cost in zip(("llama", "qwen"), costs, strict=True):
            record = records[name][position]
            assert record["joint_nll"] == pytest.approx(cost, abs=SAME)
            assert record["picked"] == (cost == min(costs))
        chosen.append(int(np.argmin(costs)))
    assert len(set(chosen)) == 2, "both readers must be picked somewhere, or the order was not tested"
    assert told["readers"]["llama"]["picked"] == pytest.approx(chosen.count(0) / COUNT)
    assert told["unscored"] == 0 and told["examples"] == COUNT


def test_scores_are_those_of_the_picked_and_of_the_best(wire):
    encoded, indices = wire[4].encoded, wire[4].indices
    gold = [encoded.examples[index].answers[0] for index in indices]
    said = {"llama": [gold[0], "x", gold[2], "y", "z"], "qwen": ["u", gold[1], gold[2], "v", "w"]}
    told, records = pick(wire, said)
    assert told["oracle"]["em"] == pytest.approx(3 / COUNT)
    assert told["readers"]["llama"]["em"] == pytest.approx(2 / COUNT)
    assert told["readers"]["qwen"]["f1"] == pytest.approx(2 / COUNT)
    picked = [next(r for own in records.values() if (r := own[i])["picked"])["f1"] for i in range(COUNT)]
    assert told["joint"]["f1"] == pytest.approx(np.mean(picked))
    for key in ("joint", "oracle"):
        low, high = told[key]["f1_interval"]
        assert low <= told[key]["f1"] <= high
    assert told["agreement"] == pytest.approx(1 / COUNT)


def test_agreement_is_of_normalised_answers_and_the_earlier_reader_is_picked_of_equals(wire):
    told, records = pick(wire, {"llama": ["Lisbon", "b", "c", "d", "e"], "qwen": ["the lisbon.", "b", "x", "y", "z"]})
    assert answers.normalise("the lisbon.") == "lisbon"
    assert told["agreement"] == pytest.approx(2 / COUNT)
    same = [records[name][1] for name in ("llama", "qwen")]
    assert same[0]["joint_nll"] == same[1]["joint_nll"]
    assert (same[0]["picked"], same[1]["picked"]) == (True, False)


def test_candidate_without_a_cost_is_picked_only_where_none_has_one(wire):
    told, records = pick(wire, {"llama": ["", "Oslo", TOO_LONG, "d", "e"], "qwen": ["b", TOO_LONG, TOO_LONG, "", "z"]})
    assert [record["picked"] for record in records["llama"]][:4] == [False, True, True, True]
    assert records["llama"][0]["joint_nll"] is None and records["qwen"][0]["joint_nll"] is not None
    assert told["unscored"] == 1
    _, records = pick(wire, {"llama": [TOO_LONG] * COUNT, "qwen": ["b"] * COUNT}, max_new_tokens=96)
    assert all(record["joint_nll"] for record in records["llama"]), "what may be generated may be scored"


def test_one_reader_has_nobody_to_agree_with(wire):
    recipe, _, bench, options, measured, _ = wire
    alone = dataclasses.replace(measured, records=[r for r in measured.records if r["reader"] == "qwen"])
    assert joint.pick(bench, alone, recipe.layout, options=options, seed=0) is None
