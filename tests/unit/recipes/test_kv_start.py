"""Adapters of keys and values begin at the reader's own, and know the words where they are aligned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.types import Example
from lw_jax.data import batches, prompt_tokens
from lw_jax.models import decoder, encoder, kv_prefix
from lw_jax.recipes import kv_start
from tests import tiny

NAME, TEXTS = "qwen", 12  # the reader, and held-out texts


def made_sums(inputs, targets, *, shift=0.0):
    """Sums of windows [n z] and their keys and values [n l 2 k e], every fourth of them held out."""
    held = np.arange(len(inputs)) % 4 == 3
    wide, parts = np.append(inputs, np.ones((len(inputs), 1)), axis=1), (~held, held)
    moved = targets - shift
    return kv_start.Sums(
        np.stack([wide[one].T @ wide[one] for one in parts]),
        np.stack([np.einsum("nz,nlske->zlske", wide[one], moved[one]) for one in parts]),
        np.stack([np.einsum("nlske->ls", moved[one] ** 2) for one in parts]),
        np.full(targets.shape[1:], shift),
    )


@pytest.fixture(scope="module")
def linear():
    """(latents, keys and values that follow from them, the map, their mean)."""
    rng = np.random.default_rng(0)
    inputs, kernel = rng.standard_normal((400, 6)), rng.standard_normal((6, 3, 2, 2, 4))
    kernel *= np.array([[10.0, 0.1], [1.0, 0.3], [4.0, 2.0]])[None, :, :, None, None]  # sizes of keys and of values
    mean = 30.0 * rng.standard_normal((3, 2, 2, 4))
    return inputs, np.einsum("nz,zlske->nlske", inputs, kernel) + mean, kernel, mean


@pytest.mark.parametrize("shift", [0.0, 25.0])
def test_a_linear_relation_is_found_layer_by_layer(linear, shift):
    inputs, targets, kernel, mean = linear
    found = kv_start.fit(made_sums(inputs, targets, shift=shift))
    assert (found.explained > 0.999).all()
    largest = np.abs(kernel).max(axis=(0, 3, 4), keepdims=True)  # a layer's keys or values each have a size
    np.testing.assert_allclose(found.kernel / largest, kernel / largest, atol=0.01)
    np.testing.assert_allclose(found.mean, mean, atol=0.1)
    np.testing.assert_allclose(found.size, targets.std(axis=0).mean(axis=(2, 3)), rtol=0.5)


def test_what_follows_from_nothing_is_shrunk_to_the_mean(linear):
    inputs, targets, _, _ = linear
    noise = np.random.default_rng(1).permutation(targets)
    found = kv_start.fit(made_sums(inputs, noise))
    assert (np.abs(found.explained) < 0.1).all()
    moved = np.einsum("nz,zlske->nlske", inputs, found.kernel)
    assert moved.std() < 0.1 * targets.std()


def make(root, start, **changes):
    body = {"encoder__kind": "lm", "encoder__source": str(tiny.readers(root)["llama"]), "encoder__layers": 1}
    kind = {"adapter__kind": "kv", "adapter__start": start, "encoder__width": 48}
    return tiny.make_recipe(root, only=NAME, **kind, **body, **changes)


def test_a_start_that_reads_some_texts_reads_all_sources(root, monkeypatch):
    recipe = make(root, "aligned")
    found = [Example("", f"source {n // 300}, text {n}" + " and on" * 30, "?", ("on",)) for n in range(600)]
    monkeypatch.setattr(recipe.curriculum, "examples", lambda split: found)
    read = [one.text[:8] for one in kv_start._choose(recipe.start_texts, recipe.layout, aligned=True)]
    assert len(read) < 100 and min(map(read.count, ("source 0", "source 1"))) > len(read) / 4


@pytest.fixture(scope="module")
def started(root):
    recipes = {start: make(root, start) for start in ("random", "aligned")}
    return {start: (recipe, recipe.build()) for start, recipe in recipes.items()}


@pytest.fixture(scope="module")
def own_windows(started):
    """The reader's keys and values [n l 2 k e] of held-out texts, averaged over the windows of the encoder's slots."""
    recipe, built = started["random"]
    reader, tokenizer, texts = recipe.wire.readers[NAME], recipe.tokenizers[NAME], recipe.data("validation").examples
    wanted, params, texts = [], built.frozen[NAME], texts[:TEXTS]
    before = prompt_tokens.shared_prefix(NAME, recipe.layout.readers[NAME], recipe.layout.prompt)[None]
    shared = decoder.SharedPrefix(decoder.embed(params, jnp.asarray(before)), jnp.ones(before.shape, bool))
    encoded = [tokenizer.encode(example.context) for example in texts]
    read = batches.field([np.array(one) for one in encoded], 0, left=False).collate(range(len(texts)))
    take = jax.jit(lambda x, mask: kv_prefix.take(params, reader.config, x, mask=mask, shared_prefix=shared))
    own = take(decoder.embed(params, jnp.asarray(read["ids"])), jnp.asarray(read["mask"]))
    for row, example in enumerate(texts):
        source = recipe.layout.source.starts(example.context)
        bounds = kv_start.window_starts(source, recipe.cfg.encoder.slots)
        weights = kv_start.window_weights(tokenizer.starts(example.context), bounds, len(encoded[row]))
        weights /= weights.sum(axis=1, keepdims=True)
        both = np.stack([part[:, row, : len(encoded[row])] for part in (own.k, own.v)], axis=1)
        wanted.append(np.einsum("mt,lstke->mlske", weights, both))
    return np.concatenate(wanted)


@pytest.mark.parametrize("start", ["random", "aligned"])
def test_keys_and_values_have_the_readers_own_mean_and_size(started, own_windows, start):
    (recipe, built), own = started[start], own_windows
    source = jax.tree.map(jnp.asarray, recipe.data("validation").collate(range(TEXTS))["source"])

    @jax.jit
    def run(trainable):
        return recipe.wire.prefix(trainable["adapters"][NAME], NAME, recipe.wire.encode(trainable, source), "answer")

    made = run(built.trainable)
    found = np.stack([made.k, made.v], axis=3).transpose(1, 2, 0, 3, 4, 5)
    found = found.reshape(-1, *own.shape[1:])
    spread = own.std(axis=0).mean(axis=(2, 3))
    off = np.abs(found.mean(axis=0) - own.mean(axis=0)).mean(axis=(2, 3))
    assert (off < 0.7 * spread).all()
    ratio = found.std(axis=0).mean(axis=(2, 3)) / spread
    assert (ratio < 1.8).all() and (start == "aligned" or (ratio > 0.5).all()), "a regression shrinks, no draw does"
    each = np.square(found - own).sum(axis=(0, 3, 4)) / np.square(own - own.mean(axis=0)).sum(axis=(0, 3, 4))
    errors = each.mean()  # of every layer's keys and values alike
    assert errors < 0.97 if start == "aligned" else errors > 1.1, errors


def test_windows_are_those_of_the_encoders_slots():
    starts = [0, 3, 5, 9, 10, 14, 20]
    for windows in (2, 3, 7, 9):
        mask = jnp.asarray([[True] * 7 + [False] * 2])
        pooled = np.asarray(encoder.window_weights(mask, windows, jnp.asarray([windows])))[0] > 0
        own = kv_start.window_weights(starts, kv_start.window_starts(starts, windows), 7) > 0
        np.testing.assert_array_equal(own, pooled[:, :7])


def test_a_window_inside_one_token_takes_that_token_and_one_that_is_not_wholly_read_none():
    inside = kv_start.window_weights([0, 10], kv_start.window_starts([0, 3, 6, 9, 12], 5), 2)
    np.testing.assert_array_equal(inside, [[1, 0], [1, 0], [1, 0], [0, 1], [0, 1]])
    beyond = kv_start.window_weights([0, 4, 8, 10, 13, 16], kv_start.window_starts([0, 3, 6, 9, 12, 15], 3), 3)
    np.testing.assert_array_equal(beyond, [[1, 1, 0], [0, 0, 0], [0, 0, 0]])
