"""encoder.local: a token of the body attends to its neighbours on both sides alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.models import decoder, encoder
from lw_jax.recipes import encoder_bodies
from tests import tiny

SAME = 2e-5  # fp32, values of unit size: the same sums in another order
LOCAL = 3


def test_local_attention_is_that_of_a_dense_band(root, monkeypatch):
    source = str(tiny.readers(root)["llama"])
    keys = {"encoder__kind": "lm", "encoder__source": source, "encoder__layers": 2}
    recipe = tiny.make_recipe(root, encoder__local=LOCAL, **keys)
    own = recipe.wire.encoder.body
    assert isinstance(own, decoder.DecoderConfig)
    body = encoder.keep_body(decoder.init(jax.random.key(3), own, jnp.float32, scale=0.3))
    mask = jnp.asarray(np.arange(17) < np.array([[17], [11]]))
    ids = jnp.where(mask, jax.random.randint(jax.random.key(4), mask.shape, 0, own.vocab), 0)

    def states(cfg, ids):
        mode = decoder.Mode(causal=False)
        return np.asarray(encoder.read_lm(body, cfg, jnp.eye(3)[2], ids=ids, mask=mask, mode=mode))

    local, everywhere = states(own, ids), dataclasses.replace(own, window=0)
    assert np.abs(local - states(everywhere, ids))[0].max() > 0.1
    place = np.arange(17)
    band = jnp.asarray(np.abs(place[:, None] - place[None, :]) <= LOCAL)[None, None]
    dense = decoder.attention
    monkeypatch.setattr(decoder, "attention", lambda q, k, v, *, mask, **more: dense(q, k, v, mask=mask & band, **more))
    np.testing.assert_allclose(local[mask], states(everywhere, ids)[mask], atol=SAME)
    seen = np.abs(states(own, ids.at[0, 8].add(1)) - local)[0].max(axis=1) > 0
    assert np.flatnonzero(seen).tolist() == list(range(8 - 2 * LOCAL, 8 + 2 * LOCAL + 1)), (
        "two layers reach twice as far"
    )


def test_nearer_of_the_body_s_own_window_and_the_configured_one_holds_and_is_told(root):
    keys = {"encoder__kind": "lm", "encoder__source": str(tiny.readers(root)["llama"])}
    recipe = tiny.make_recipe(root, encoder__local=LOCAL, **keys)
    own = recipe.wire.encoder.body
    assert isinstance(own, decoder.DecoderConfig) and own.window == LOCAL + 1
    for window, local, found in ((0, 0, 0), (9, 0, 9), (9, LOCAL, LOCAL + 1), (2, LOCAL, 2)):
        spec = dataclasses.replace(recipe.cfg.encoder, local=local)
        assert encoder_bodies.cut(dataclasses.replace(own, window=window), spec).window == found
    assert f"local {LOCAL}" in recipe.identity()["encoder"]
