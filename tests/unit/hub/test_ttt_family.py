"""TTT models as files: every field that is read or refused, by name, and the tensors of the authors' layout."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.hub import ttt_family, weights
from lw_jax.hub.families import HARMLESS
from lw_jax.models import ttt
from lw_jax.models.ttt import TTTConfig
from tests.tiny import assert_equal_trees
from tests.tiny import edit_tensors as edit

SMALL = TTTConfig(vocab=37, width=12, layers=2, heads=3, ffn=17)
OTHER = TTTConfig(
    vocab=41,
    width=20,
    layers=3,
    heads=2,
    ffn=23,
    inner="mlp",
    chunk=7,
    base_rate=0.1,
    pre_conv=True,
    share_qk=True,
    gate=True,
    kernel=3,
    rope_theta=500.0,
    norm_eps=1e-5,
    tied=False,
)
MIXED = dataclasses.replace(SMALL, share_qk=True, tied=False)
FIELDS = {
    "model_type": "ttt",
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 17,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


# --- config.json ---


def test_silent_file_means_what_the_authors_class_takes():
    assert ttt_family.ttt_config(FIELDS) == SMALL
    optional = ttt_family.hf_fields(SMALL).keys() - FIELDS.keys() - {"architectures"}
    assert ttt_family.ttt_config(FIELDS | dict.fromkeys(optional)) == SMALL


def test_fields_that_change_nothing_are_passed_over():
    more = {"max_position_embeddings": 2048, "pretraining_tp": 1, "scan_checkpoint_group_size": 4, "use_cache": False}
    more |= {"hidden_act": "silu", "is_encoder_decoder": False}
    for field, value in (more | dict.fromkeys(HARMLESS, "any")).items():
        assert ttt_family.ttt_config(FIELDS | {field: value}) == SMALL, field


REFUSED = [
    {"model_type": "llama"},
    {"ttt_reg": 0.1},
    {"quantization_config": {"bits": 4}},
    {"hidden_act": "gelu"},
    {"is_encoder_decoder": True},
    {"ttt_layer_type": "conv"},
    {"share_qk": 1},
    {"mini_batch_size": 0},
    {"conv_kernel": True},
    {"ttt_base_lr": float("nan")},
    {"rope_theta": 0},
    {"vocab_size": "37"},
    {"num_hidden_layers": 10**9},
    {"num_attention_heads": 4},  # heads of width 3
]


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_field_that_cannot_be_is_refused_by_name(change):
    ((key, value),) = change.items()
    with pytest.raises(UserError, match=re.escape(key) + ".*" + re.escape(str(value))) as caught:
        ttt_family.ttt_config(FIELDS | change, where="folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")


# --- tensors ---


def random(cfg):
    rng = np.random.default_rng(1)
    # Numbers that fp16 and bf16 hold exactly.
    return jax.tree.map(lambda leaf: np.float32(rng.integers(-64, 64, leaf.shape) / 32), ttt.abstract(cfg))


@pytest.fixture
def saved(tmp_path):
    """(folder, parameters) of a tied model."""
    params = random(SMALL)
    weights.save_ttt(tmp_path / "model", params, SMALL)
    return tmp_path / "model", params


@pytest.mark.parametrize("cfg", [SMALL, OTHER, MIXED])
def test_saved_model_loads_back_unchanged(cfg, tmp_path):
    params = random(cfg)
    weights.save_ttt(tmp_path, params, cfg)
    assert weights.is_ttt(tmp_path) and weights.describe_ttt(tmp_path) == cfg
    assert_equal_trees(weights.load_ttt(tmp_path), params)


def test_rows_that_are_no_token_are_not_saved(tmp_path):
    cfg = dataclasses.replace(MIXED, rows=48)
    params = random(cfg)
    weights.save_ttt(tmp_path, params, cfg)
    assert weights.describe_ttt(tmp_path) == MIXED
    found = weights.load_ttt(tmp_path)
    for name in ("embed", "head"):
        np.testing.assert_array_equal(found[name], params[name][:37])


def test_tied_file_may_hold_an_equal_head_and_no_other(saved):
    folder, params = saved
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert_equal_trees(weights.load_ttt(folder), params)
    edit(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((5, 7), 9.0))
    with pytest.raises(UserError, match="lm_head.weight differs from the embedding.*set tie_word_embeddings to false"):
        weights.load_ttt(folder)
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(fields))
    assert weights.load_ttt(folder)["head"][5, 7] == 9.0


def test_buffers_that_follow_from_the_configuration_are_left_out_floats_cast_and_others_refused(saved):
    folder, params = saved
    block = "model.layers.0.seq_modeling_block."
    buffers = {block + "token_idx": np.ones(16, np.float32), block + "rotary_emb.inv_freq": np.ones(2, np.float32)}
    edit(folder, lambda tensors: tensors.update({name: one.astype(np.float16) for name, one in tensors.items()}))
    edit(folder, lambda tensors: tensors.update(buffers))
    assert_equal_trees(weights.load_ttt(folder), params)
    edit(folder, lambda tensors: tensors.update(extra=np.ones(3, np.float32)))
    with pytest.raises(UserError, match="tensor extra"):
        weights.load_ttt(folder)


def test_folder_that_is_no_ttt_model_is_refused(saved, tmp_path):
    folder, _ = saved
    assert not weights.is_ttt(tmp_path)
    with pytest.raises(UserError, match="no config.json"):
        weights.describe_ttt(tmp_path)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    assert not weights.is_ttt(folder)
    with pytest.raises(UserError, match="model_type='bert'"):
        weights.load_ttt(folder)
