"""A text read twice, coded and fitted is the same on any devices; a reader that cannot see all of it is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lw_jax.core.errors import UserError
from lw_jax.models import cache_choice, cache_code, decoder, kv_prefix
from tests import tiny

SAME = 3e-5  # fp32, values of unit size: the same sums in another order
CFG = tiny.DECODER
MASK = np.arange(11) < np.array([11, 7, 9, 4])[:, None]


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    monkeypatch.setattr(cache_choice, "BLOCK", 4)


def read(params, cfg, mask):
    keys = jax.random.split(jax.random.key(3), 2)
    x = jax.random.normal(keys[0], (*mask.shape, cfg.width))
    asking = decoder.SharedPrefix(jax.random.normal(keys[1], (1, 3, cfg.width)), jnp.ones((1, 3), bool))
    shared = decoder.SharedPrefix(asking.x[:, :2], asking.mask[:, :2])
    return cache_choice.read_twice(params, cfg, x, mask=mask, again=asking, shared_prefix=shared, keep_queries=True)


def test_several_devices_find_the_same():
    params = tiny.draw_decoder(CFG)
    count = jnp.asarray(cache_choice.count_kept(np.full((CFG.layers, CFG.kv_heads), 0.4), MASK.sum(axis=1)))

    @jax.jit
    def run(mask):
        found = read(params, CFG, mask)
        assert found.queries is not None
        kept = cache_choice.choose(found.scores, mask, count)
        fitted = cache_choice.fit(
            CFG, found.queries, found.text, kept, seen=2, sizes=kv_prefix.all_keys(CFG, MASK.shape[1])
        )
        return found.text, found.scores, kept, fitted

    def code(text):
        shape = (CFG.layers, CFG.kv_heads, CFG.head_dim)
        y = cache_code.states(text.k, text.v)
        found = cache_code.fit_code(lambda: [(y.reshape(-1, y.shape[2]), text.mask.reshape(-1))], shape, 8)
        return cache_code.read(found, cache_code.write(found, text))

    wanted = run(jnp.asarray(MASK))
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    found = run(jax.device_put(MASK, NamedSharding(mesh, PartitionSpec("data"))))
    assert len(found[1].sharding.device_set) == 4
    np.testing.assert_array_equal(found[2], wanted[2])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=SAME), found, wanted)
    for one, other in zip(code(found[0]), code(wanted[0]), strict=True):
        np.testing.assert_allclose(np.asarray(one)[:, MASK], np.asarray(other)[:, MASK], atol=10 * SAME)


def test_a_window_shorter_than_the_text_twice_is_refused():
    mask = jnp.asarray(MASK)
    length = 2 + 3 + 2 * MASK.shape[1]
    jax.eval_shape(lambda: read(tiny.draw_decoder(CFG), dataclasses.replace(CFG, window=length), mask))
    with pytest.raises(UserError, match=rf"{length} positions.*{length - 1}.*context_tokens"):
        read(tiny.draw_decoder(CFG), dataclasses.replace(CFG, window=length - 1), mask)


def test_states_that_are_all_alike_have_a_code():
    shape = (CFG.layers, CFG.kv_heads, CFG.head_dim)
    y = jnp.full((3, 2 * CFG.layers * CFG.kv_heads * CFG.head_dim), 5.0)
    code = cache_code.fit_code(lambda: [(y, jnp.ones(3, bool))], shape, 4)
    k, v = cache_code.read(code, jnp.ones((1, 2, 4)))
    assert np.isfinite(k).all() and np.isfinite(v).all()
    np.testing.assert_allclose(code.mean, 5.0)


def test_a_head_whose_fitted_values_would_explode_has_exact_ones():
    """One kept key to which no query pays; the text's others give much."""
    keys = jnp.asarray([[[4.0, 0.0], [4.0, 0.1], [-9.0, 0.0]]])
    values = jnp.asarray([[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]])
    queries = jnp.asarray([[[[2.0, 0.0]], [[2.0, 0.3]], [[2.0, -0.3]]]])
    scores = jnp.einsum("bqge,bte->bqgt", queries * 2**-0.5, keys)
    total = jax.nn.logsumexp(scores, axis=-1) + 0.3  # of other keys beside the text
    for place, exact in ((0, False), (2, True)):
        at, chosen = slice(place, place + 1), jnp.ones((1, 1), bool)
        sent = keys[:, at], values[:, at], chosen
        found, _ = cache_choice._fit_head(queries, total, keys, values, *sent, mask=jnp.ones((1, 3), bool))
        assert np.isfinite(found).all() and np.linalg.norm(found) <= 3.0
        assert np.allclose(found, values[:, at]) == exact
