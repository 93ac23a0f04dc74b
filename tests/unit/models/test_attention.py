"""Causal attention in blocks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models.attention import BLOCK, LEAST, attention

LENGTH, BEFORE = 4 * BLOCK + 5, 3  # queries, and keys of a prefix


@pytest.mark.parametrize("factors", [None, "bfloat16"])
def test_blocks_of_causal_queries_give_what_the_whole_gives(factors):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (1, length, heads, 8))
        for key, length, heads in zip(keys, (LENGTH, LENGTH + BEFORE, LENGTH + BEFORE), (4, 2, 2), strict=False)
    )
    behind = np.arange(LENGTH)[:, None] + BEFORE >= np.arange(LENGTH + BEFORE)
    mask = jnp.asarray(behind & (np.arange(LENGTH + BEFORE) != 7))[None, None]  # and one that is padding
    bias = jnp.where(jax.random.uniform(keys[3], (1, LENGTH + BEFORE, 2)) < 0.2, LEAST, 0.5)

    def run(causal):
        def total(q, k, v, bias):
            out = attention(q, k, v, mask=mask, bias=bias, factors=factors, causal=causal)
            return jnp.square(out).sum(), out

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)).lower(q, k, v, bias).compile()

    whole, blocks = (run(causal) for causal in (False, True))
    assert blocks.cost_analysis()["flops"] < 0.7 * whole.cost_analysis()["flops"]
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=2e-5),
        blocks(q, k, v, bias),
        whole(q, k, v, bias),
    )
