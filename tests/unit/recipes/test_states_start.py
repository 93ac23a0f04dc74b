"""An encoder of several layers' states: what it pools, that it may be causal, and where it starts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.core.types import EXACT
from lw_jax.data import batches, prompt_tokens
from lw_jax.models import decoder, encoder, kv_prefix
from lw_jax.recipes import frozen_models, latentwire, states_start
from tests import tiny

SLOTS = 6


def sums(inputs, targets):
    wide = np.append(inputs, np.ones((len(inputs), 1)), axis=1)
    return {"gram": wide.T @ wide, "crossed": wide.T @ targets, "power": (targets**2).sum(axis=0)}


def test_regression_finds_the_few_directions_that_targets_follow_from():
    rng = np.random.default_rng(0)
    sizes = np.array([1e-2, 1.0, 30.0, 1.0, 0.1, 3.0, 1.0, 1.0])
    constant = np.full((500, 1), 7.0)
    inputs = np.append(rng.standard_normal((500, 8)) * sizes + 5.0, constant, axis=1)
    hidden = ((inputs - 5.0)[:, :8] / sizes) @ rng.standard_normal((8, 3))
    targets = hidden @ rng.standard_normal((3, 12)) * np.repeat([100.0, 0.1], 6) - 4.0
    shift, scale, kernel = states_start.fit(**sums(inputs, targets), groups=2, width=3)
    assert scale[-1] == 0.0, "what never changes says nothing"
    latents = ((inputs - shift) * scale) @ kernel
    np.testing.assert_allclose(np.cov(latents.T), np.eye(3), atol=0.02)
    error = targets - targets.mean(axis=0) - latents @ np.linalg.lstsq(latents, targets - targets.mean(axis=0))[0]
    assert (error.std(axis=0) < 0.02 * targets.std(axis=0)).all()
    two = ((inputs - shift) * scale) @ states_start.fit(**sums(inputs, targets), groups=2, width=2)[2]
    np.testing.assert_allclose(two, latents[:, :2], atol=1e-6)  # the first directions are the best ones


def test_rarest_tokens_stand_in_their_order_and_a_short_text_repeats_its_last():
    rarity = jnp.asarray([0.0, 5.0, 1.0, 4.0, 4.0, 2.0])
    ids = jnp.asarray([[4, 2, 1, 5, 3, 0, 2], [2, 5, 0, 1, 1, 1, 1]])
    mask = jnp.asarray([[True] * 7, [True, True, False, False, False, False, False]])
    found = encoder.rarest(rarity, ids, mask=mask, count=jnp.asarray([3, 4]), slots=4)
    np.testing.assert_array_equal(found[0, :3], [0, 2, 4])
    np.testing.assert_array_equal(found[1], [0, 1, 1, 1])


def make(root, **changes):
    body = {"encoder__kind": "lm", "encoder__source": str(tiny.readers(root)["llama"]), "encoder__mask": "causal"}
    body |= {"encoder__pooling": "rare", "encoder__states": 2, "encoder__layers": 0}
    body |= {"encoder__slots": SLOTS, "encoder__width": 48}
    return tiny.make_recipe(root, only="llama", adapter__kind="kv", adapter__start="aligned", **body | changes)


@pytest.fixture(scope="module")
def started(root):
    recipe = make(root)
    return recipe, recipe.build()


def test_rarity_is_counted_in_a_few_texts_at_a_time(started, monkeypatch):
    recipe, built = started
    read, tokenize = [], prompt_tokens.tokenize
    monkeypatch.setattr(latentwire, "COUNTED", 5)
    monkeypatch.setattr(
        prompt_tokens, "tokenize", lambda tokenizer, texts: read.append(len(texts)) or tokenize(tokenizer, texts)
    )
    again = recipe._count_tokens(built.trainable, {})["encoder"]["head"]["pool"]["rarity"]
    np.testing.assert_array_equal(again, built.trainable["encoder"]["head"]["pool"]["rarity"])
    assert max(read) == 5 and sum(read) == len({one.context for one in recipe.curriculum.examples("train")})


def test_adapters_start_near_the_keys_and_values_of_the_rarest_tokens(started):
    recipe, built = started
    reader, params = recipe.wire.readers["llama"], built.frozen["llama"]
    rarity = built.trainable["encoder"]["head"]["pool"]["rarity"]
    texts = [recipe.layout.source.encode(one.context) for one in recipe.curriculum.examples("validation")[:16]]
    read = batches.field([np.array(text) for text in texts], 0, left=False).collate(range(16))
    channel = jnp.tile(jnp.asarray([[SLOTS, recipe.cfg.encoder.width, EXACT]], jnp.int32), (16, 1))

    @jax.jit
    def run(ids, mask):
        latents = recipe.wire.encode(built.trainable, {"ids": ids, "mask": mask, "channel": channel})
        places = encoder.rarest(rarity, ids, mask=mask, count=jnp.full(16, SLOTS), slots=SLOTS)
        own = kv_prefix.take(params, reader.config, decoder.embed(params, ids), mask=mask)
        made = recipe.wire.prefix(built.trainable["adapters"]["llama"], "llama", latents, "answer")
        return places, (own.k, own.v), made[:2]

    places, own, made = jax.device_get(run(read["ids"], read["mask"]))
    rows, slots = np.nonzero(places > 0)  # the first token is unlike all others
    power = np.stack([one[:, rows, places[rows, slots]] for one in own])
    error = np.stack([one[:, rows, slots] for one in made]) - power
    assert (error**2).mean() < 0.35 * (power - power.mean(axis=2, keepdims=True)).var()


def test_states_are_those_before_the_layers(started):
    recipe, built = started
    spec, body = recipe.wire.encoder, built.trainable["encoder"]["body"]
    ids = jnp.arange(7)[None] + 3
    mask, mode = jnp.ones(ids.shape, bool), decoder.Mode()
    found = encoder.read_lm(body, spec.body, None, ids=ids, mask=mask, mode=mode, taps=spec.body.layers)
    count = spec.body.layers + 1
    for layer in range(spec.body.layers):
        alone = encoder.read_lm(body, spec.body, jnp.eye(count)[layer], ids=ids, mask=mask, mode=mode)
        own = found[..., layer * spec.body.width : (layer + 1) * spec.body.width]
        np.testing.assert_allclose(own, alone, atol=1e-5)
    assert encoder.tapped_layers(6, 30) == (2, 7, 12, 17, 22, 27) and encoder.tapped_layers(1, 2) == (1,)


@pytest.mark.slow
def test_start_is_the_same_for_a_frozen_body(root, started):
    other = make(root, encoder__rank=2).build()
    for name in ("shift", "scale"):
        mine, theirs = (built.trainable["encoder"]["head"][name] for built in (started[1], other))
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_training_moves_all_but_the_rarity_on_any_devices(root, tmp_path):
    curves = []
    for devices in (1, 4):
        recipe = make(root, encoder__ratio=4, train__steps=4, compute__dtype="fp32", devices=devices)
        before = jax.device_get(recipe.build().trainable["encoder"]["head"])
        code, losses, state = tiny.unsaved_curve(recipe, tmp_path / f"run{devices}")
        after = state["encoder"]["head"]
        assert code == 0 and all(np.abs(after[name] - before[name]).max() > 1e-5 for name in ("shift", "scale"))
        np.testing.assert_array_equal(*(one["pool"]["rarity"] for one in (before, after)))
        curves.append(losses)
    np.testing.assert_allclose(*curves, rtol=1e-4)


def test_more_states_than_layers_are_refused(root):
    recipe = make(root)
    with pytest.raises(UserError, match=r"encoder\.states=99"):
        frozen_models.cut_body(recipe.wire.encoder.body, dataclasses.replace(recipe.cfg.encoder, states=99))
