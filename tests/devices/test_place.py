"""sharding/place.py: the global batch is the same set of examples whatever the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from sharding import mesh as meshes
from sharding import place, rules
from sharding.errors import PlacementError
from sharding.tables import TRAINABLE


def make_batch(size: int) -> dict:
    ids = np.arange(size * 5, dtype=np.int32).reshape(size, 5)
    return {"source": {"ids": ids, "mask": ids % 3 == 0}, "index": np.arange(size, dtype=np.int32)}


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "data_axis", "shape"),
    [
        *((32, 0, 1, (32, 1, 0)), (32, 0, 8, (4, 1, 0)), (32, 4, 1, (4, 8, 0)), (24, 2, 3, (2, 4, 0))),
        *((64, 0, 3, (22, 1, 2)), (64, 0, 5, (13, 1, 1)), (64, 0, 6, (11, 1, 2)), (64, 0, 7, (10, 1, 6))),
        *((64, 8, 3, (8, 3, 8)), (64, 21, 3, (11, 2, 2)), (32, 5, 2, (4, 4, 0)), (32, 64, 2, (16, 1, 0))),
        (8, 7, 7, (2, 1, 6)),
    ],
)
def test_cut_holds_the_batch_and_as_little_filling_as_its_accumulation_allows(
    global_batch, micro_batch, data_axis, shape
):
    found = place.cut(global_batch=global_batch, micro_batch=micro_batch, data_axis=data_axis)
    assert (found.micro_batch, found.accumulation, found.filling) == shape
    assert found.rows == found.micro_batch * found.accumulation * data_axis == global_batch + found.filling
    assert found.micro_batch <= (micro_batch or global_batch)
    assert found == place.cut(global_batch=global_batch, micro_batch=found.micro_batch, data_axis=data_axis)
    assert bool(found.describe()) == bool(found.filling)
    assert not any(place.Cut(other, data_axis, found.accumulation).filling for other in found.full_batches)


def test_filling_is_described_with_the_batches_that_have_none():
    told = place.cut(global_batch=8, micro_batch=0, data_axis=3).describe()
    assert "1 of 9 rows" in told and "train.global_batch=6 or 9" in told


def test_cut_that_leaves_a_device_without_examples_is_refused():
    with pytest.raises(PlacementError, match="mesh.data=2, or global_batch 8 or more"):
        place.cut(global_batch=2, micro_batch=0, data_axis=8)


@pytest.mark.parametrize(
    ("global_batch", "data_axis", "sizes"),
    [
        (64, 1, [1, 2, 4, 8, 16, 32, 64]),
        (24, 2, [1, 2, 3, 4, 6, 12]),
        (64, 3, [1, 2, 11, 22]),
        (128, 3, [1, 2, 3, 4, 9, 11, 22, 43]),  # a share of 43, a prime: 22 x 2 holds it with one row of filling
    ],
)
def test_micro_batches_to_try_are_those_that_divide_and_of_uneven_shares_those_with_little_filling(
    global_batch, data_axis, sizes
):
    found = place.micro_batches(global_batch=global_batch, data_axis=data_axis)
    assert found == sizes
    cuts = [place.cut(global_batch=global_batch, micro_batch=size, data_axis=data_axis) for size in found]
    assert [cut.micro_batch for cut in cuts] == found


@pytest.mark.parametrize(
    ("batch", "count", "used"), [(64, 7, 7), (8, 7, 4), (8, 3, 3), (3, 8, 3), (1, 2, 1), (12, 8, 6), (16, 8, 8)]
)
def test_devices_are_used_as_long_as_they_make_the_largest_share_smaller(batch, count, used):
    assert place.spread(batch, count) == used


@pytest.mark.parametrize(("data", "steps"), [(1, 3), (4, 1), (8, 3)])
def test_every_example_arrives_once_with_its_own_row_on_every_mesh(data, steps):
    batch = make_batch(24)
    placed = place.put_batch(batch, meshes.make(data=data), accumulation=steps)
    assert placed["source"]["ids"].shape == (steps, 24 // steps, 5)
    assert placed["source"]["ids"].sharding.spec == P(None, "data")
    for leaf in jax.tree.leaves(placed):
        assert leaf.sharding.shard_shape(leaf.shape)[1] == 24 // steps // data
    index = np.asarray(placed["index"])
    assert sorted(index.ravel().tolist()) == list(range(24))
    np.testing.assert_array_equal(np.asarray(placed["source"]["ids"]), batch["source"]["ids"][index])
    np.testing.assert_array_equal(np.asarray(placed["source"]["mask"]), batch["source"]["mask"][index])


def test_what_each_process_has_computed_for_itself_is_the_first_ones_for_all(monkeypatch):
    """Processors of two kinds solve an equation to other last bits, which JAX refuses to place."""
    own, first = jnp.arange(8.0), np.arange(8, dtype=np.float32) + 1
    split = jax.NamedSharding(meshes.make(data=4), P("data"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda leaf: first)
    placed = place.put_first({"kernel": own}, {"kernel": split})["kernel"]
    np.testing.assert_array_equal(placed, first)
    assert placed.sharding == split and placed.sharding.shard_shape((8,)) == (2,)


def test_batch_is_whole_along_the_model_axis():
    placed = place.put_batch(make_batch(8), meshes.make(data=2, model=4), accumulation=2)
    assert placed["index"].sharding.shard_shape((2, 4)) == (2, 2)
    assert len(placed["index"].sharding.device_set) == 8


def test_device_bytes_counts_the_share_of_one_device():
    tree = {"w": jax.ShapeDtypeStruct((16, 3), jnp.bfloat16), "b": jax.ShapeDtypeStruct((5,), jnp.float32)}
    table = [("w", P("data")), ("b", P())]

    def bytes_of(table, data):
        placed = rules.shardings(table, tree, meshes.make(data=data), name="t")
        return place.device_bytes(place.place_shapes(tree, placed))

    for data in (1, 2, 4, 8):
        assert bytes_of(table, data) == 16 * 3 * 2 // data + 5 * 4
        assert bytes_of(TRAINABLE, data) == 16 * 3 * 2 + 5 * 4
    assert place.device_bytes(tree) == 16 * 3 * 2 + 5 * 4
    assert (
        place.device_bytes(place.put_eval(make_batch(16), meshes.make(data=4))) == (16 * 5 * 4 + 16 * 5 + 16 * 4) // 4
    )
