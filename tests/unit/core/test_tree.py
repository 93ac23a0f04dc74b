"""lw_jax/core/tree.py: paths, sizes and digests."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lw_jax.core import tree
from sharding import mesh as meshes


def make() -> dict:
    return {
        "layers": {"q": np.arange(35, dtype=np.float32).reshape(5, 7), "bias": np.ones(3, ml_dtypes.bfloat16)},
        "count": np.int32(11),
    }


def test_sizes_count_elements_and_bytes_once_whatever_the_tree_is_of():
    placed = jax.device_put(make(), jax.NamedSharding(meshes.make(), P()))
    for some in (make(), placed, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make()))):
        assert (tree.count(some), tree.nbytes(some)) == (5 * 7 + 3 + 1, 4 * 5 * 7 + 2 * 3 + 4)


def test_digest_is_the_same_for_host_and_any_mesh():
    placed = jax.device_put(make(), jax.NamedSharding(meshes.make(), P()))
    assert tree.digest(placed) == tree.digest(make())
    split = {"w": np.arange(48, dtype=np.float32).reshape(16, 3)}
    across = jax.device_put(split, jax.NamedSharding(meshes.make(), P("data")))
    assert tree.digest(across) == tree.digest(split)


@pytest.mark.parametrize(
    "change",
    [
        lambda some: some["layers"]["q"].__setitem__((4, 6), np.nextafter(np.float32(34), np.float32(0))),
        lambda some: some["layers"]["q"].__setitem__((0, 0), np.float32(-0.0)),
        lambda some: some.update(count=some["count"].view(np.uint32)),  # the same bits
        lambda some: some["layers"].update(q=some["layers"]["q"].reshape(7, 5)),
        lambda some: some["layers"].update(k=some["layers"].pop("q")),
    ],
)
def test_digest_sees_every_change(change):
    some = make()
    change(some)
    assert tree.digest(some) != tree.digest(make())


def test_digest_is_the_one_that_earlier_checkpoints_hold():
    known = "0950280cfef10cd6f6dec5c089f9e0f357a67dd57b166a7e48511d281f1433d8"
    assert tree.digest({"a": {"w": np.arange(5.0)}}) == known
