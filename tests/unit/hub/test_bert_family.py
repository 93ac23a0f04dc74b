import re

import pytest

from lw_jax.core.errors import UserError
from lw_jax.hub import bert_family
from lw_jax.models.bert import BertConfig

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
    return bert_family.bert_config(fields, raw_keys=set(fields), where="here.json")


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
    ],
)
def test_field_that_changes_the_mathematics_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=rf"here\.json.*{re.escape(key)}"):
        read(FIELDS | {key: value})


def test_missing_size_is_refused_by_name():
    with pytest.raises(UserError, match="hidden_size is missing"):
        read({name: value for name, value in FIELDS.items() if name != "hidden_size"})


@pytest.mark.parametrize(
    ("stored", "present"),
    [
        ("bert.encoder.layer.0.output.LayerNorm.gamma", "encoder.layer.0.output.LayerNorm.weight"),
        ("bert.encoder.layer.10.attention.self.key.bias", "encoder.layer.10.attention.self.key.bias"),
        ("pooler.dense.weight", None),
        ("bert.embeddings.position_ids", None),
        ("classifier.weight", "classifier.weight"),
    ],
)
def test_stored_names_of_all_times_are_known(stored, present):
    assert bert_family.present_name(stored) == present
