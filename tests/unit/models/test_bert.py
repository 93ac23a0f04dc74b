"""BERT's body by itself; that it equals transformers' is in tests/parity/test_bert.py."""

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.models import bert, decoder

CFG = bert.BertConfig(vocab=47, width=42, layers=3, heads=6, ffn=53, norm_eps=1e-12, max_positions=23, token_types=2)
GRADIENTS = 1e-4  # relative to the largest: the backward pass doubles the depth of the sums


def test_remat_recomputes_and_changes_no_gradient():
    shapes = bert.abstract(CFG, jnp.float32)
    params = jax.tree.map(lambda leaf: 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes)
    ids = jnp.asarray(np.random.default_rng(0).integers(1, CFG.vocab, (2, 13)), jnp.int32)
    mask = jnp.asarray(np.arange(13) < np.array([13, 5])[:, None])

    def gradient(remat):
        def total(params):
            mode = decoder.Mode(remat=remat)
            return jnp.sum(jnp.sin(bert.forward(params, CFG, ids, mask=mask, mix=jnp.full((4,), 0.25), mode=mode)))

        return jax.jit(jax.grad(total))

    plain, again = gradient("none")(params), gradient("full")(params)
    top = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=GRADIENTS * top), plain, again)
    erfs, dots = (
        [str(jax.make_jaxpr(gradient(kind))(params)).count(word) for kind in ("none", "full")]
        for word in (" erfc ", " dot_general[")
    )
    assert erfs == [2, 2], "the layer's activation is made again in both"
    assert dots[1] - dots[0] == 6, "q, k, v, o, up and down; attention's own products in both"
