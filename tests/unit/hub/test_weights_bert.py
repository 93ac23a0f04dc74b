"""BERT-class bodies: fields of config.json, and tensors; what they share with readers is in test_weights.py."""

import re

import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.hub import bert_family, weights
from lw_jax.models.bert import BertConfig
from tests import tiny
from tests.tiny import assert_equal_trees
from tests.tiny import edit_tensors as edit

FIELDS = {
    "model_type": "bert",
    "vocab_size": 47,
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 53,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 23,
    "type_vocab_size": 2,
}
CFG = BertConfig(vocab=47, width=42, layers=3, heads=6, ffn=53, norm_eps=1e-12, max_positions=23, token_types=2)


def read(fields):
    return bert_family.bert_config(fields, where="here.json")


def test_sizes_are_read_and_what_no_state_depends_on_is_let_pass():
    harmless = {"hidden_dropout_prob": 0.1, "pooler_type": "first_token_transform", "directionality": "bidi"}
    stated = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False, "pruned_heads": {}}
    assert read(FIELDS) == read(FIELDS | harmless | stated) == CFG


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "roberta"),
        ("hidden_act", "gelu_new"),
        ("position_embedding_type", "relative_key"),
        ("add_cross_attention", True),
        ("quantization_config", {"bits": 4}),
        ("embedding_size", 128),
        ("num_attention_heads", 5),
        ("type_vocab_size", 0),
        ("hidden_size", None),
    ],
)
def test_missing_size_and_field_that_changes_the_mathematics_are_refused_by_name(key, value):
    with pytest.raises(UserError, match=rf"here\.json.*{re.escape(key)}"):
        read(FIELDS | {key: value})


# --- tensors


@pytest.fixture
def body(tmp_path):
    """(folder, configuration, parameters as they must be read)."""
    return tmp_path / "bert", *tiny.write_bert(tmp_path / "bert")


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_body_loads_as_it_was_written(tmp_path, prefix):
    cfg, params = tiny.write_bert(tmp_path, prefix=prefix)
    assert weights.describe_bert(tmp_path) == cfg
    assert_equal_trees(weights.load_bert(tmp_path), params)


def test_names_of_before_2019_are_known_and_parts_beside_the_body_left_out(body):
    folder, _, params = body

    def change(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("weight", "gamma").replace("bias", "beta")] = tensors.pop(name)
        tensors["embeddings.position_ids"] = np.arange(61)[None]
        tensors["pooler.dense.weight"] = np.ones((42, 42), np.float32)
        tensors["cls.predictions.bias"] = np.ones(7, np.float32)

    edit(folder, change)
    assert_equal_trees(weights.load_bert(folder), params)


KEY = "encoder.layer.1.attention.self.key.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"classifier.weight": t[KEY]}), r"classifier\.weight belongs to no known part"),
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
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match="model_type='qwen2'.*encoder.kind 'lm'"):
        weights.describe_bert(tmp_path)
    with pytest.raises(UserError, match=r"m\.gguf: a BERT-class body is a folder"):
        weights.describe_bert(tmp_path / "m.gguf")
