"""A BERT-class body as the encoder of a whole run: it learns."""

import jax
import numpy as np
import pytest

from tests import tiny

pytestmark = pytest.mark.slow


def test_run_with_a_bert_body_learns_in_its_body_too(root, tmp_path):
    tiny.write_bert(tmp_path)
    keys = {"encoder__kind": "bert", "encoder__source": str(tmp_path), "encoder__window": 61, "encoder__windows": 5,
            "encoder__layers": 2, "encoder__rate": 1.0}  # fmt: skip
    code, losses, trainable = tiny.unsaved_curve(tiny.make_recipe(root, only="qwen", **keys), tmp_path / "run")
    assert code == 0 and losses[-1] < losses[0]
    start = jax.device_get(tiny.make_recipe(root, only="qwen", **keys).build().trainable)["encoder"]["body"]
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), start, trainable["encoder"]["body"])
    still = {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in
             jax.tree_util.tree_leaves_with_path(moved) if not leaf}  # fmt: skip
    assert still <= {"layers/k_bias"}, "which no score sees: rounding alone moves it"
