"""BERT's body by itself; that it equals transformers' is in tests/parity/test_bert.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import bert, decoder

CFG = bert.BertConfig(vocab=47, width=42, layers=3, heads=6, ffn=53, norm_eps=1e-12, max_positions=23, token_types=2)
SAME = 2e-5  # fp32, states of unit size: the same sums in another order
GRADIENTS = 1e-4  # relative to the largest: the backward pass doubles the depth of the sums


@pytest.fixture(scope="module")
def params():
    leaves, treedef = jax.tree_util.tree_flatten_with_path(bert.abstract(CFG, jnp.float32))
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noise = [0.3 * jax.random.normal(key, leaf.shape) for key, (_, leaf) in zip(keys, leaves, strict=True)]
    norms = [str(path[-1].key).endswith("norm") for path, _ in leaves]
    return treedef.unflatten([1 + x if norm else x for x, norm in zip(noise, norms, strict=True)])


def text(width, *, pad=0, lengths=(13, 5)):
    ids, mask = np.full((len(lengths), width), pad, np.int32), np.zeros((len(lengths), width), bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = np.random.default_rng(row).integers(1, CFG.vocab, length)
        mask[row, :length] = True
    return jnp.asarray(ids), jnp.asarray(mask)


@functools.partial(jax.jit, static_argnames=("cfg", "remat"))
def run(params, ids, mask, mix=None, cfg=CFG, remat="none"):
    return bert.forward(params, cfg, ids, mask=mask, mix=mix, mode=decoder.Mode(remat=remat))


def test_mix_is_the_weighted_sum_of_normalised_states(params):
    ids, mask = text(13)
    shares = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    one = [run(params, ids, mask, mix=row) for row in jnp.eye(4)]
    np.testing.assert_allclose(jnp.mean(jnp.square(one[2]), axis=-1), 1, atol=SAME)
    want = sum(share * state for share, state in zip(np.asarray(shares), one, strict=True))
    np.testing.assert_allclose(run(params, ids, mask, mix=shares), want, atol=SAME)
    last = run(params, ids, mask)
    np.testing.assert_allclose(one[3], last / jnp.sqrt(jnp.mean(last**2, axis=-1, keepdims=True)), atol=SAME)


def test_remat_recomputes_and_changes_no_gradient(params):
    ids, mask = text(13)
    mix = jnp.full((4,), 0.25)

    def gradient(remat):
        return jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(run(params, ids, mask, mix=mix, remat=remat)))))

    plain, again = gradient("none")(params), gradient("full")(params)
    top = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=GRADIENTS * top), plain, again)
    erfs, dots = (
        [str(jax.make_jaxpr(gradient(kind))(params)).count(word) for kind in ("none", "full")]
        for word in (" erfc ", " dot_general[")
    )
    assert erfs == [2, 2], "the layer's activation is made again in both"
    assert dots[1] - dots[0] == 6, "q, k, v, o, up and down; attention's own products in both"
