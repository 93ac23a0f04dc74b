"""Messages by their texts' length: as many slots as a text needs at so many tokens a slot, wherever one is made."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.types import EXACT
from lw_jax.data.batches import other_examples
from lw_jax.data.prompt_tokens import count_slots
from lw_jax.evals import control_rows, quality_curve
from lw_jax.inference.trained_wire import TrainedWire
from lw_jax.models import codec
from tests import tiny

MOST, RATIO, STEPS = 9, 13, 14
SIZES = {
    "encoder__slots": MOST,
    "encoder__ratio": RATIO,
    "stages__pretrain__share": 6 / STEPS,
    "stages__pretrain__lengths": (7, 13),
    "stages__answer__ratios": (11, 17),
    "train__steps": STEPS,
}
ROWS = ("latents", "shuffled", "zero", "random", "truncated", "text")


@pytest.fixture(scope="module")
def recipe(root):
    return tiny.make_recipe(root, only="qwen", **SIZES)


@pytest.fixture(scope="module")
def built(recipe):
    return recipe.build()


def lengths(batch):
    return batch["source"]["mask"].sum(axis=1)


def needed(tokens, ratio):
    return np.minimum(MOST, np.ceil(tokens / ratio))


def test_a_message_has_a_slot_for_each_started_part_of_its_text_at_least_one_and_no_more_than_fit():
    tokens = [0, 1, 4, 5, 27, 28, 29, 1000]
    assert count_slots(tokens, ratio=4, most=7).tolist() == [1, 1, 1, 2, 7, 7, 7, 7]
    assert count_slots(tokens, ratio=0, most=7).tolist() == [7] * 8
    assert count_slots([27, 27, 27], ratio=np.array([4, 9, 27]), most=99).tolist() == [7, 3, 1]


def test_passages_have_the_encoder_s_ratio_and_questions_one_that_is_drawn(recipe):
    schedule = recipe.data_schedule()
    batches = [schedule.batch(number, global_batch=8, seed=0, share=slice(None)) for number in range(STEPS)]
    for one in batches[:6]:
        np.testing.assert_array_equal(one["source"]["channel"][:, 0], needed(lengths(one), RATIO))
        np.testing.assert_array_equal(one["readers"]["qwen"]["channel"], one["source"]["channel"])
    widest = [max(lengths(one)) for one in batches[:6]]
    assert max(widest[:3]) < min(widest[3:]), "lengths have parts of their own"
    tokens = np.concatenate([lengths(one) for one in batches[6:]])
    slots = np.concatenate([one["source"]["channel"][:, 0] for one in batches[6:]])
    fine, coarse = needed(tokens, 11), needed(tokens, 17)
    assert ((slots == fine) | (slots == coarse)).all()
    assert 0.25 < np.mean(slots[fine != coarse] == coarse[fine != coarse]) < 0.75
    half = schedule.batch(9, global_batch=8, seed=0, share=slice(4, 8))
    np.testing.assert_array_equal(half["source"]["channel"], batches[9]["source"]["channel"][4:])


@pytest.fixture(scope="module")
def measured(recipe, built):
    """(bench, options, what was measured, the prompts of messages)."""
    bench = tiny.make_bench(recipe, built, tiny.Recorder)
    options = dataclasses.replace(
        recipe.cfg.eval, examples=4, batch=4, rows=ROWS, max_new_tokens=2, curve="nll", curve_examples=4
    )
    found = control_rows.measure(bench, recipe.data("validation", rows=("text", "truncated")), options=options)
    return bench, options, found, list(bench.functions.seen)


def test_readers_see_the_slots_of_the_message_that_they_are_given(measured):
    _, _, found, seen = measured
    encoded, others = found.encoded, other_examples(found.encoded.examples)
    own = needed(np.array([len(encoded.source.ids[i]) for i in found.indices]), RATIO)
    other = needed(np.array([len(encoded.source.ids[others[i]]) for i in found.indices]), RATIO)
    assert len(set(own)) > 1 and not np.array_equal(own, other)
    for row, wanted, (channel, latents) in zip(ROWS, (own, other, own, own), seen, strict=False):
        np.testing.assert_array_equal(channel[:, 0], wanted)
        if row != "zero":
            np.testing.assert_array_equal(latents.any(axis=2).sum(axis=1), wanted, err_msg=row)
        positions = [record["positions"] for record in found.of("qwen", row)]
        np.testing.assert_array_equal(positions, wanted + 1, err_msg=row)
    np.testing.assert_array_equal([record["positions"] for record in found.of("qwen", "truncated")], own)


def test_the_curve_measures_the_ratios_in_real_messages(recipe, measured):
    bench, options, found, _ = measured
    sent = recipe.cfg.stages.answer
    curve = quality_curve.sweep(bench, found, options=options, sent=sent, seed=0)
    tokens = np.array([len(found.encoded.source.ids[i]) for i in found.indices])
    width = recipe.cfg.encoder.width
    for point in curve.points:
        slots = needed(tokens, point["ratio"])
        assert point["slots"] == pytest.approx(slots.mean(), abs=0.01)
        assert point["framed_bytes"] == np.mean([codec.framed_bytes(int(one), width, point["bits"]) for one in slots])
    assert {point["ratio"] for point in curve.points} == {11, 17}
    plain = dataclasses.replace(sent, ratios=())
    curve = quality_curve.sweep(bench, found, options=options, sent=plain, seed=0)
    assert {point["ratio"] for point in curve.points} == {RATIO}


def test_a_message_is_what_a_batch_would_send(recipe, built):
    wire = TrainedWire(recipe, built.trainable, built.frozen, 0)
    encoded = recipe.data("validation")
    batch = encoded.collate([0, 1])
    latents = wire.functions.encode(built.trainable, jax.tree.map(jnp.asarray, batch["source"]))
    for row in range(2):
        slots = int(batch["source"]["channel"][row, 0])
        message = wire.write(encoded.examples[row].context, bits=16)
        assert codec.read_frame(message).slots == slots < MOST
        found = codec.unpack(message, encoder=wire.encoder_fingerprint)
        np.testing.assert_allclose(found, latents[row, :slots], atol=5e-3)
    source = jax.tree.map(lambda leaf: jnp.asarray(leaf[:1]), batch["source"])
    small = wire.functions.encode(built.trainable, source | {"channel": jnp.asarray([[2, 7, EXACT]])})[0, :2, :7]
    message = wire.write(encoded.examples[0].context, bits=16, slots=2, width=7)
    found = codec.unpack(message, encoder=wire.encoder_fingerprint)
    wanted = small / np.sqrt(np.mean(np.square(small), axis=1, keepdims=True))  # a message has its own unit RMS
    np.testing.assert_allclose(found, wanted, rtol=2**-10, atol=1e-4)
