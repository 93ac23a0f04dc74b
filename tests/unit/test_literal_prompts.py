"""Literals in a reader's prompt: their tokens, place and masks, in training batches and under every placement."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core import validation
from lw_jax.core.errors import UserError
from lw_jax.data import batches, data_schedule, prompt_tokens
from lw_jax.models import wire
from tests import tiny

LOSS = 1e-5  # relative, fp32 after six optimizer steps: sums in another order
LOGITS = 3e-5  # fp32 logits of unit size: the same sums in another order
WORDS = 3


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LW_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def make(root, **changes):
    source = str(tiny.readers(root)["llama"])
    changes = {"encoder__kind": "lm", "encoder__source": source, "message__literals": WORDS} | changes
    return tiny.make_recipe(root, **changes)


@pytest.fixture(scope="module")
def recipe(root, cache):
    return make(root)


@pytest.fixture(scope="module")
def encoded(recipe):
    return recipe.data("validation")


def test_every_reader_has_the_same_words_in_its_own_tokens(recipe, encoded):
    batch = encoded.collate(range(len(encoded)))
    for name, tokenizer in recipe.tokenizers.items():
        field = batch["readers"][name]["literals"]
        for i, example in enumerate(encoded.examples):
            ids = field["ids"][i][field["mask"][i]]
            assert ids.tolist() == tokenizer.encode(prompt_tokens.JOINED.join(example.literals))[: 6 * WORDS]
            assert 1 <= sum(len(phrase.split()) for phrase in example.literals) <= WORDS
            assert all(phrase in example.context for phrase in example.literals)
        assert field["mask"][:, -1].all(), "left-padded"
    plain = tiny.make_recipe(recipe.locations["llama"].parent).data("validation")
    assert "literals" not in plain.collate([0])["readers"]["llama"]
    assert encoded.digest() != plain.digest()


@pytest.mark.parametrize(
    ("user", "gap"),
    [("{context}\nQ: {question}", ""), ("{context} Q: {question}", ""), ("{context}Q: {question}", "\n")],
)
def test_literals_never_run_into_the_question(recipe, encoded, user, gap):
    layout = dataclasses.replace(recipe.layout, prompt=dataclasses.replace(recipe.cfg.prompt, user=user))
    example = encoded.examples[0]
    fields = batches.encode([example], layout=layout, rows=("text", "none")).collate([0])["readers"]["llama"]
    tokenizer = recipe.tokenizers["llama"]
    middle = user.split("{context}")[1].format(question=example.question)
    assert fields["after"]["ids"][0][fields["after"]["mask"][0]].tolist() == tokenizer.encode(
        gap + middle + "\nAnswer:"
    )
    none = fields["none"]["ids"][0][fields["none"]["mask"][0]].tolist()
    assert none == [*tokenizer.begin, *tokenizer.encode(middle + "\nAnswer:")], "no text row has the gap"


def test_literals_beyond_six_tokens_a_word_are_cut_and_counted(recipe, encoded):
    example = dataclasses.replace(encoded.examples[0], literals=("zyxwvutsrqponmlkjihgfedcba",))
    layout = dataclasses.replace(recipe.layout, literals=1)
    found = batches.encode([example], layout=layout)
    assert [len(found.readers[name]["literals"].ids[0]) for name in recipe.tokenizers] == [6, 6]
    assert found.counts["literals_cut"] == 1 and any("literals cut" in line for line in found.describe())


def logits(recipe, built, name, fields, latents):
    prefix = recipe.wire.prefix(built.trainable["adapters"][name], name, latents, "answer")
    prompt = wire.wire_prompt(built.frozen[name], fields, prefix)
    found = recipe.wire.answer_logits(built.frozen[name], name, prompt, fields)
    return np.asarray(found)[np.asarray(fields["weights"]) > 0]


@pytest.mark.parametrize("kind", ["embeddings", "kv"])
def test_either_part_of_a_message_may_be_masked_as_if_it_were_not_there(root, encoded, kind):
    recipe = make(root, adapter__kind=kind)
    built = recipe.build()
    batch = jax.tree.map(jnp.asarray, encoded.collate(range(4)))
    latents = recipe.wire.encode(built.trainable, batch["source"])
    for name, fields in batch["readers"].items():
        words = fields["literals"]
        whole = logits(recipe, built, name, fields, latents)
        bare = fields | {"literals": words | {"mask": jnp.zeros_like(words["mask"])}}
        absent = {key: field for key, field in fields.items() if key != "literals"}
        alone = logits(recipe, built, name, bare, latents)
        np.testing.assert_allclose(alone, logits(recipe, built, name, absent, latents), atol=LOGITS)
        wordy = fields | {"channel": fields["channel"].at[:, 0].set(0)}
        without = logits(recipe, built, name, wordy, latents)
        np.testing.assert_allclose(without, logits(recipe, built, name, wordy, latents * 7 + 1), atol=LOGITS)
        assert np.abs(whole - alone).max() > 0.05 and np.abs(whole - without).max() > 0.05
        # By hand: the text of the literals between the task's vector and the question.
        text = wire.after_prefix(fields)
        np.testing.assert_array_equal(text["ids"][:, : words["ids"].shape[1]], words["ids"])
        np.testing.assert_array_equal(text["ids"][:, words["ids"].shape[1] :], fields["after"]["ids"])


def test_dropout_is_a_function_of_the_batch_alone_and_drops_one_part(recipe):
    schedule = make_schedule(recipe, 0.4)
    whole = schedule.batch(5, global_batch=32, seed=3, share=slice(0, 32))
    plain = make_schedule(recipe, 0.0).batch(5, global_batch=32, seed=3, share=slice(0, 32))
    np.testing.assert_array_equal(whole["index"], plain["index"])
    for name, fields in whole["readers"].items():
        wordless = ~fields["literals"]["mask"].any(axis=1)
        silent = fields["channel"][:, 0] == 0
        assert wordless.any() and silent.any() and not (wordless & silent).all() and not (wordless & silent).any()
        kept = ~wordless
        np.testing.assert_array_equal(
            fields["literals"]["mask"][kept], plain["readers"][name]["literals"]["mask"][kept]
        )
        np.testing.assert_array_equal(fields["channel"][~silent], plain["readers"][name]["channel"][~silent])
    assert (whole["source"]["channel"][:, 0] > 0).all(), "the encoder writes all its slots"
    halves = [schedule.batch(5, global_batch=32, seed=3, share=share) for share in (slice(0, 11), slice(11, 32))]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *halves)
    jax.tree.map(np.testing.assert_array_equal, joined, whole)


def make_schedule(recipe, dropout):
    return data_schedule.DataSchedule(
        (data_schedule.Phase(1, ((recipe.curriculum.stream("train", "answer", 0), 1.0),), dropout=dropout),)
    )


def test_run_has_the_dropout_of_its_configuration_only_where_messages_have_literals(root, recipe):
    assert {phase.dropout for phase in recipe.data_schedule().phases} == {recipe.cfg.message.dropout} == {0.1}
    assert {phase.dropout for phase in make(root, message__literals=0).data_schedule().phases} == {0.0}


def test_planned_batch_has_the_fields_and_limits_of_a_real_one(root):
    for changes in ({}, {"stages__pretrain__share": 0.5, "stages__pretrain__lengths": (16, 48)}):
        made = make(root, **changes)
        planned = made.batch_widths()
        for real in made.data_schedule().shapes():
            for name, fields in real["readers"].items():
                width = planned["readers"][name]["literals"]["ids"].shape[0]
                assert fields["literals"]["ids"].shape[1] <= width == 6 * WORDS
            if real["readers"]["llama"]["task"] == planned["readers"]["llama"]["task"]:
                assert jax.tree.structure(planned) == jax.tree.structure(real)


@pytest.mark.slow
@pytest.mark.parametrize(
    "placed", [{"devices": 4}, {"devices": 2, "strategy": "split", "train__micro_batch": 2}], ids=str
)
def test_loss_curve_with_all_tasks_is_that_of_one_device(root, placed, tmp_path):
    stages = {"stages__pretrain__share": 0.5, "stages__pretrain__lengths": (16,), "message__dropout": 0.3}
    curves = [
        tiny.unsaved_curve(make(root, **stages, **one), tmp_path / str(i))[1] for i, one in enumerate(({}, placed))
    ]
    np.testing.assert_allclose(curves[1], curves[0], rtol=LOSS)


@pytest.mark.parametrize("kind", ["bytes", "bert"])
def test_encoder_that_cannot_foretell_is_refused(root, kind):
    source = {"encoder__source": "" if kind == "bytes" else "x"}
    cfg = tiny.make_config(root, message__literals=2, encoder__kind=kind, **source)
    with pytest.raises(UserError, match=r"config\.message\.literals = 2: .*'lm'"):
        validation.validate(cfg)
