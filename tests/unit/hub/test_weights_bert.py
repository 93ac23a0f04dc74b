"""BERT-class bodies from safetensors; what they share with readers is in test_weights.py."""

import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.hub import weights
from tests import tiny
from tests.tiny import assert_equal_trees
from tests.tiny import edit_tensors as edit


@pytest.fixture
def body(tmp_path):
    """(folder, configuration, parameters as they must be read)."""
    return tmp_path / "bert", *tiny.write_bert(tmp_path / "bert")


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_body_loads_as_it_was_written(tmp_path, prefix):
    cfg, params = tiny.write_bert(tmp_path, prefix=prefix)
    assert weights.describe_bert(tmp_path) == cfg
    assert_equal_trees(weights.load_bert(tmp_path), params)


def test_parts_beside_the_body_are_left_out(body):
    folder, _, params = body

    def change(tensors):
        tensors["embeddings.position_ids"] = np.arange(61)[None]
        tensors["pooler.dense.weight"] = np.ones((42, 42), np.float32)
        tensors["cls.predictions.bias"] = np.ones(7, np.float32)

    edit(folder, change)
    assert_equal_trees(weights.load_bert(folder), params)


KEY = "encoder.layer.1.attention.self.key.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(KEY), r"key\.weight is missing"),
        (lambda t: t.update({"classifier.weight": t[KEY]}), r"classifier\.weight belongs to no known part"),
        (lambda t: t.update({KEY: t[KEY][:, :41].copy()}), r"key\.weight has shape \(42, 41\).*\(42, 42\)"),
        (lambda t: t.update({"bert." + KEY: t[KEY]}), r"key\.weight is the same as"),
    ],
)
def test_wrong_tensor_is_refused_by_name(body, change, message):
    edit(body[0], change)
    with pytest.raises(UserError, match=message):
        weights.load_bert(body[0])


def test_reader_and_body_are_not_taken_for_each_other(body, tmp_path):
    with pytest.raises(UserError, match="model_type='bert'"):
        weights.describe(body[0])
    with pytest.raises(UserError, match="model_type='qwen2'.*encoder.kind 'lm'"):
        weights.describe_bert(tiny.write_reader(tmp_path / "qwen", "qwen2"))
    with pytest.raises(UserError, match=r"m\.gguf: a BERT-class body is a folder"):
        weights.describe_bert(tmp_path / "m.gguf")
