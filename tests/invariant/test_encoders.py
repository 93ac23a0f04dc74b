"""A BERT-class body as the encoder of a whole run: it learns, stops, and goes on."""

import jax
import numpy as np
import pytest

from lw_jax.core import runtime
from tests import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    tiny.write_bert(folder)
    return {"encoder__kind": "bert", "encoder__source": str(folder), "encoder__window": 61, "encoder__windows": 5,
            "encoder__layers": 2, "encoder__rate": 1.0}  # fmt: skip


@pytest.fixture(scope="module")
def whole(root, keys, tmp_path_factory):
    return tiny.curve(tiny.make_recipe(root, only="qwen", **keys), tmp_path_factory.mktemp("whole"))


def test_run_with_a_bert_body_learns_in_its_body_too(root, keys, whole):
    code, losses, trainable = whole
    assert code == 0 and losses[-1] < losses[0]
    start = jax.device_get(tiny.make_recipe(root, only="qwen", **keys).build().trainable)["encoder"]["body"]
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), start, trainable["encoder"]["body"])
    still = {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in
             jax.tree_util.tree_leaves_with_path(moved) if not leaf}  # fmt: skip
    assert still <= {"layers/k_bias"}, "which no score sees: rounding alone moves it"


def test_stopped_run_with_a_bert_body_goes_on_bit_equal(root, keys, whole, tmp_path):
    code, before, _ = tiny.curve(
        tiny.make_recipe(root, only="qwen", **keys), tmp_path / "run", stop=lambda step: step == 4
    )
    assert code == runtime.REQUEUE and before == whole[1][:4]
    code, losses, trainable = tiny.curve(tiny.make_recipe(root, only="qwen", **keys), tmp_path / "run")
    assert code == 0 and losses == whole[1]
    jax.tree.map(np.testing.assert_array_equal, trainable, whole[2])
