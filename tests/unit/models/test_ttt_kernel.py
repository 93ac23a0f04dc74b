"""The kernel of a TTT layer gives the scan's outputs and gradients; on a CPU in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from lw_jax.core.precision import Precision
from lw_jax.models.ttt_inner import Inner, Text, read_by_chunk
from lw_jax.models.ttt_kernel import read_by_kernel
from sharding import shards
from tests.ttt_cases import draw_inner

MESHES = {count: Mesh(np.array(jax.devices()[:count]).reshape(count, 1), ("data", "model")) for count in (1, 4)}
ROWS = 4


def gradients(read, case):
    p, weights, text, towards = case

    def loss(p, weights, text):
        return jnp.vdot(read(p, weights, text).astype(jnp.float32), towards)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(p, weights, text)


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def by_scan(precision, p, weights, text):
    return read_by_chunk(Inner(p, precision), text, weights, lengths=None, unroll=1, measured=False)[0]


def by_kernel(mesh, precision, p, weights, text):
    return read_by_kernel(Inner(p, precision), text, weights, shards.by_rows(mesh))


# Of a gradient's size; in bf16 sums in another order now and then round a factor the other way.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_outputs_and_gradients_are_the_scans(dtype, tolerance):
    precision = Precision(dtype, dtype)
    p, weights, text, towards = draw_inner(ROWS)
    case = p, weights, Text(*(x.astype(dtype) for x in text[:3]), text.rate), towards
    ways = (functools.partial(by_scan, precision), functools.partial(by_kernel, MESHES[4], precision))
    expected, found = (jax.jit(lambda *case, way=way: gradients(way, case))(*case) for way in ways)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


def test_shards_that_keep_their_own_gradients_have_the_sums_of_one_device():
    precision, case = Precision("float32", "float32"), draw_inner(ROWS)

    def sums(count, p, weights, text, towards):
        split = shards.Shards(MESHES[count])

        def one(weights, text, towards):
            return gradients(functools.partial(by_kernel, MESHES[count], precision), (p, weights, text, towards))

        loss, (of_p, of_weights, of_text) = split.map(one)(*split.split((weights, text, towards)))
        return split.sum((loss, of_p)), split.join((of_weights, of_text))

    expected, found = (jax.jit(functools.partial(sums, count))(*case) for count in (1, 4))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())
