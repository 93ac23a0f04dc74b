"""sharding/rules.py and sharding/tables.py: tables are total, live and divisible, or they are refused."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from lw_jax.models import decoder
from sharding import mesh as meshes
from sharding import rules
from sharding.errors import PlacementError
from sharding.tables import reader_table
from tests import tiny

TREE = {
    "encoder": {"kernel": np.zeros((4, 6)), "gain": np.zeros(6)},
    "blocks": [{"kernel": np.zeros((2, 8))}, {"kernel": np.zeros((2, 8))}],
}


def reader(**changes) -> dict:
    """The abstract tree of a reader: layers 3, width 24, head width 8."""
    sizes = {"vocab": 28, "width": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 20}
    return decoder.abstract(dataclasses.replace(tiny.DECODER, **sizes | changes), np.float32)


FAMILIES = {
    "llama": reader(tied=False, qkv_bias=False),
    "llama, tied": reader(tied=True, qkv_bias=False),
    "qwen": reader(tied=False, qkv_bias=True),
    "qwen, tied": reader(tied=True, qkv_bias=True),
    "stablelm": reader(tied=False, qkv_bias=True, norm="layer"),
}


def specs(tree: dict) -> dict:
    return {rules.path_of(path): leaf.spec for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_path_names_keys_positions_and_fields():
    state = {"opt": optax.adam(1e-3).init({"w": np.zeros(3, np.float32)})}
    paths = [rules.path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths == ["opt/0/count", "opt/0/mu/w", "opt/0/nu/w"]


def test_first_matching_row_wins_and_the_structure_stays():
    table = [("blocks/1/.*", 1), (".*/kernel", 2), (".*", 3)]
    assert rules.match(table, TREE, name="t") == {
        "encoder": {"kernel": 2, "gain": 3},
        "blocks": [{"kernel": 2}, {"kernel": 1}],
    }


@pytest.mark.parametrize(
    ("tree", "table", "words"),
    [
        (TREE, [("encoder", 0), (".*kernel", 1)], "encoder/gain"),  # a regex matches the whole path
        (TREE, [(".*/kernel", 0)], r"rates: no row covers encoder/gain \(6,\); add a row"),
        ({f"w{i}": np.zeros(2) for i in range(7)}, [], "w4 .* and 2 more"),
        (TREE, [(".*/kernel", 0), ("decoder/.*", 1), (".*", 2)], "rates: row 2 'decoder/.*' decides none of 4 leaves"),
        (TREE, [(".*/kernel", 0), ("encoder/kernel", 1), (".*", 2)], "row 2 'encoder/kernel' decides none of 4 leaves"),
    ],
)
def test_table_that_leaves_a_leaf_out_or_has_a_row_for_none_is_refused(tree, table, words):
    with pytest.raises(PlacementError, match=words):
        rules.match(table, tree, name="rates")


@pytest.mark.parametrize(
    ("axes", "shape", "spec", "words"),
    [
        (
            *((2, 2), (2, 1, 16, 64), P(None, "model")),
            "t: llms/k (2, 1, 16, 64): dim 1 (1) does not divide mesh axis model=2 (sizes that do: 1); "
            "row 1 '.*'; choose another size of the axis or another placement",
        ),
        ((4, 2), (4, 3), P(("data", "model")), "llms/k (4, 3): dim 0 (4) does not divide mesh axis data=4 x model=2"),
        ((2, 1), (6,), P(None, "data"), "names 2 dims of 1"),
    ],
)
def test_spec_that_does_not_go_with_a_shape_or_the_mesh_is_refused(axes, shape, spec, words):
    tree = {"llms": {"k": jax.ShapeDtypeStruct(shape, np.float32)}}
    with pytest.raises(PlacementError, match=re.escape(words)):
        rules.shardings([(".*", spec)], tree, meshes.make(data=axes[0], model=axes[1]), name="t")


def test_declared_specs_are_tried_in_their_order():
    tree = {"a": np.zeros((4, 6)), "b": np.zeros((3, 6)), "c": np.zeros((3, 5))}
    table = [(".*", (P("model"), P(None, "model"), P()))]
    assert specs(rules.shardings(table, tree, meshes.make(data=1, model=2), name="t")) == {
        "a": P("model"),
        "b": P(None, "model"),
        "c": P(),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("placement", ["replicate", "fsdp", "tensor"])
@pytest.mark.parametrize("prefix", [False, True])
def test_reader_tables_are_total_and_live_for_every_family(family, placement, prefix):
    tree = {"mine": FAMILIES[family]} if prefix else FAMILIES[family]
    mesh = meshes.make(data=2, model=2) if placement == "tensor" else meshes.make(data=4)
    placed = rules.shardings(reader_table(placement), tree, mesh, name=placement)
    for path, spec in specs(placed).items():
        split = any(axis is not None for axis in spec)
        small = "norm" in path or (placement == "fsdp" and "bias" in path)
        assert split == (placement != "replicate" and not small), path
        assert not ("layers/" in path and spec and spec[0]), f"{path}: the layer axis is split"


def test_tensor_table_keeps_heads_whole_that_do_not_divide_but_splits_the_mlp():
    tree = reader(tied=True, qkv_bias=True, heads=7, kv_heads=1, vocab=29)
    placed = specs(rules.shardings(reader_table("tensor"), tree, meshes.make(data=1, model=2), name="t"))
    assert placed["layers/q"] == placed["layers/o"] == placed["layers/k"] == placed["layers/q_bias"] == P()
    assert placed["layers/up"] == P(None, "model")
    assert placed["embed"] == P(None, "model")
