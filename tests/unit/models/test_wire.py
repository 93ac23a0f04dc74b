"""The wire from ids to logits: where the prefix stands, what the answer sees, and each reader for itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.hub import weights
from lw_jax.models import decoder, encoder, kv_prefix, rotary, wire
from lw_jax.models.adapter import KeysValues
from tests import tiny

SAME = 2e-5  # fp32 logits of unit size: the same sums in another order


@pytest.fixture(scope="module")
def recipe(root):
    return tiny.make_recipe(root)


@pytest.fixture(scope="module")
def parts(recipe):
    """(trainable, one reader's frozen weights, its fields of three examples, a random prefix)."""
    built = recipe.build()
    batch = jax.tree.map(jnp.asarray, recipe.data("validation", rows=("text",)).collate(range(3)))
    prefix = 0.1 * jax.random.normal(jax.random.key(0), (3, 6, tiny.SIZES["llama"]["width"]))
    return built, batch, prefix


@functools.partial(jax.jit, static_argnames="cfg")
def logits(params, cfg, x):
    """Those of one row without padding."""
    return decoder.logits(params, decoder.forward(params, cfg, x, mask=jnp.ones(x.shape[:2], bool)).hidden)[0]


def test_prompt_is_template_text_the_slots_in_use_the_task_vector_question(parts):
    built, batch, prefix = parts
    params, fields = built.frozen["llama"], batch["readers"]["llama"]
    slots = np.array([5, 3, 1], np.int32)
    prompt = wire.wire_prompt(params, fields | {"channel": fields["channel"].at[:, 0].set(slots)}, prefix).joined()
    p, q = fields["before"]["ids"].shape[1], fields["after"]["ids"].shape[1]
    assert prompt.embeddings.shape == (3, p + 6 + q, prefix.shape[2])
    np.testing.assert_array_equal(prompt.embeddings[:, p : p + 6], prefix)
    np.testing.assert_array_equal(prompt.embeddings[:, :p], decoder.embed(params, fields["before"]["ids"]))
    np.testing.assert_array_equal(prompt.embeddings[:, p + 6 :], decoder.embed(params, fields["after"]["ids"]))
    used = np.append(np.arange(5) < slots[:, None], np.ones((3, 1), bool), axis=1)
    np.testing.assert_array_equal(
        prompt.mask, np.concatenate([fields["before"]["mask"], used, fields["after"]["mask"]], axis=1)
    )
    assert prompt.mask[:, -1].all()


def test_length_that_chooses_the_frequencies_counts_no_padding(root, parts):
    """A row alone and the same row right-padded beside longer ones: the logits, and the loss that is trained on."""
    built, batch, _ = parts
    params, fields, part = built.frozen["llama"], batch["readers"]["llama"], built.trainable["adapters"]["llama"]
    recipe = tiny.make_recipe(root)
    latents = jax.random.normal(jax.random.key(3), (3, recipe.cfg.encoder.slots, recipe.cfg.encoder.width))
    prefix = tiny.compiled(recipe.wire.prefix, part, "llama", latents, "answer")
    prompt = wire.wire_prompt(params, fields, prefix)
    rows, counts = prompt.joined(), np.asarray(fields["weights"].sum(axis=1), int)
    lengths = np.asarray(rows.mask.sum(axis=1)) + counts - 1
    short = int(np.argmin(lengths + 100 * (counts == counts.max())))
    assert counts[short] < counts.max() and lengths.max() > lengths[short], (
        "padded behind its answer; another is longer"
    )

    ones = (1.0,) * (tiny.SIZES["llama"]["head_dim"] // 2)
    scaling = rotary.LongRope(ones, tuple(3 * x for x in ones), int(lengths[short]), 1.1)
    reader = recipe.wire.readers["llama"]
    reader = dataclasses.replace(reader, config=dataclasses.replace(reader.config, rope_scaling=scaling))
    recipe.wire = dataclasses.replace(recipe.wire, readers=recipe.wire.readers | {"llama": reader})
    found = np.asarray(tiny.compiled(recipe.wire.answer_logits, params, "llama", prompt, fields))
    nll = 0.0
    for row, count in enumerate(counts):
        real = np.flatnonzero(rows.mask[row])
        answer = decoder.embed(params, fields["answer_inputs"][row : row + 1, : count - 1])
        x = jnp.concatenate([rows.embeddings[row : row + 1, real], answer], axis=1)
        expected = logits(params, reader.config, x)[len(real) - 1 :]
        np.testing.assert_allclose(found[row, :count], expected, atol=SAME)
        gold = fields["targets"][row, :count, None]
        nll -= float(jnp.take_along_axis(jax.nn.log_softmax(expected), gold, axis=1).sum())
    terms = tiny.compiled(recipe.branch, "llama", part, params, fields, latents, jax.random.key(0))
    assert float(terms.terms["nll/llama"][0]) == pytest.approx(nll, rel=SAME)


def test_every_row_of_a_batch_begins_alike(recipe):
    encoded = recipe.data("train")
    for fields in encoded.collate(range(12))["readers"].values():
        ids, mask = fields["before"]["ids"], fields["before"]["mask"]
        assert (ids == ids[:1]).all() and (mask == mask[:1]).all(), "wire_prompt reads the first row for all"


def test_readers_have_adapters_of_their_own_and_calibrated(recipe, parts):
    built, batch, _ = parts
    latents = tiny.compiled(recipe.wire.encode, built.trainable, batch["source"])
    kernels = [built.trainable["adapters"][name]["up"]["kernel"] for name in ("llama", "qwen")]
    assert kernels[0].shape == kernels[1].shape and not np.array_equal(*kernels)
    for name in ("llama", "qwen"):
        assert recipe.wire.readers[name].stops == tuple(recipe.tokenizers[name].stops) != ()
        adapter = built.trainable["adapters"][name]
        prefix = tiny.compiled(recipe.wire.prefix, adapter, name, latents, "answer")[:, :-1]
        assert prefix.shape[2] == recipe.wire.readers[name].config.width
        embedding = np.sqrt(np.mean(np.square(built.frozen[name]["embed"])))
        assert np.sqrt(np.mean(np.square(prefix))) == pytest.approx(embedding, rel=0.2)  # three texts


def test_pretrained_body_keeps_its_first_layers(root):
    folder = tiny.readers(root)["qwen"]
    recipe = tiny.make_recipe(root, encoder__kind="lm", encoder__source=str(folder), encoder__layers=1)
    body = recipe.build().trainable["encoder"]["body"]
    whole = weights.load(folder, dtype=jnp.float32)
    assert set(body) == {"embed", "layers"}, "what the encoder never reads is not trained"
    np.testing.assert_array_equal(body["embed"], whole["embed"])
    jax.tree.map(lambda kept, full: np.testing.assert_array_equal(kept, full[:1]), body["layers"], whole["layers"])
    assert recipe.abstract.trainable["encoder"]["head"]["mix"].shape == (2,)
    assert jax.tree.structure(recipe.abstract.trainable["encoder"]["body"]) == jax.tree.structure(body)


@pytest.fixture(scope="module")
def own_words(recipe, parts):
    """(the frozen readers, a batch, KeysValues of tokens that stand for slots, and the same tokens as embeddings)."""
    built, batch, _ = parts
    params, fields = built.frozen["qwen"], batch["readers"]["qwen"]
    cfg = recipe.wire.readers["qwen"].config
    ids = jax.random.randint(jax.random.key(4), (3, 5), 0, cfg.vocab)
    mask = encoder.slot_mask(jnp.asarray([5, 3, 1]), 5)
    x, task = decoder.embed(params, ids), 0.1 * jax.random.normal(jax.random.key(5), (3, 1, cfg.width))
    first = fields["before"]
    shared = decoder.SharedPrefix(decoder.embed(params, first["ids"][:1]), first["mask"][:1])
    own = tiny.compiled(kv_prefix.take, params, cfg, x, mask=mask, shared_prefix=shared)
    fields = fields | {"channel": fields["channel"].at[:, 0].set(jnp.asarray([5, 3, 1]))}
    return params, fields, KeysValues(own.k, own.v, task), jnp.concatenate([x, task], axis=1)


def test_a_prompt_of_keys_and_values_is_read_as_the_same_of_embeddings(recipe, own_words):
    params, fields, keys_values, embeddings = own_words
    found, wanted = (wire.wire_prompt(params, fields, one) for one in (keys_values, embeddings))
    assert found.kv_prefix is not None and found.positions == wanted.positions
    assert found.mask.shape[1] == wanted.mask.shape[1] - 5, "the slots are no positions that are computed"
    assert found.joined() is found
    both = [tiny.compiled(recipe.wire.answer_logits, params, "qwen", one, fields) for one in (found, wanted)]
    real = np.asarray(fields["weights"]) > 0
    np.testing.assert_allclose(np.asarray(both[0])[real], np.asarray(both[1])[real], atol=SAME)
    generate = recipe.wire.generate
    said = [tiny.compiled(generate, params, "qwen", one.joined(), max_new_tokens=5) for one in (found, wanted)]
    np.testing.assert_array_equal(*said)
