import copy
import dataclasses
import json

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from lw_jax.core.errors import UserError
from lw_jax.hub import families, weights
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.rotary import Llama3Scaling, LongRope
from tests import tiny

LLAMA = dataclasses.replace(tiny.DECODER, tied=True, qkv_bias=False)
LLAMA31 = dataclasses.replace(LLAMA, tied=False, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
QWEN = dataclasses.replace(LLAMA, qkv_bias=True)
PHI3 = dataclasses.replace(LLAMA, window=19)
PHI3_LONG = dataclasses.replace(PHI3, rotated=4, rope_scaling=LongRope((1.0, 1.5), (2.0, 7.0), 23, 1.25))
STABLELM = dataclasses.replace(LLAMA, width=60, norm="layer", rotated=4, qkv_bias=True)
FAMILIES = {"llama": LLAMA, "llama31": LLAMA31, "qwen2": QWEN, "phi3": PHI3, "phi3_long": PHI3_LONG}
FAMILIES |= {"stablelm": STABLELM, "stablelm_plain": dataclasses.replace(STABLELM, qkv_bias=False)}


def model_type(cfg: DecoderConfig) -> str:
    if cfg.norm == "layer":
        return "stablelm"
    return "phi3" if cfg.window else "qwen2" if cfg.qkv_bias else "llama"


def fields_of(cfg: DecoderConfig) -> dict:
    return families.hf_fields(cfg, model_type(cfg))


def read(fields: dict) -> DecoderConfig:
    return families.decoder_config(fields, where="here.json")


def test_absent_kv_heads_and_head_dim_follow_from_heads():
    fields = fields_of(dataclasses.replace(LLAMA, width=60))
    del fields["num_key_value_heads"], fields["head_dim"]
    cfg = read(fields)
    assert (cfg.kv_heads, cfg.head_dim) == (6, 10)


SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 8192}
SU = {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 7.0]}  # as Phi-3's first files call LongRope
SU |= {"original_max_position_embeddings": 23}


@pytest.mark.parametrize(
    ("family", "stated"),
    [
        ("llama", {}),
        ("llama", {"rope_theta": 5e5}),
        ("llama", {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 7e3, "rope_type": "default"}}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": SCALING, "rope_parameters": {"rope_type": "default"}}),
        ("llama", {"rope_scaling": {}, "rope_parameters": SCALING | {"rope_theta": 7e3}}),
        ("phi3", {"partial_rotary_factor": 0.6}),
        ("phi3_long", {"partial_rotary_factor": 0.4, "rope_scaling": SU}),
        ("stablelm", {}),
        ("stablelm", {"partial_rotary_factor": 0.8, "rope_parameters": {"partial_rotary_factor": 0.4}}),
    ],
)
def test_rotary_fields_mean_what_transformers_reads_in_any_spelling(family, stated):
    whole = fields_of(dataclasses.replace(FAMILIES[family], width=60))
    fields = {key: value for key, value in whole.items() if not key.startswith(("rope_", "partial_"))} | stated
    cfg = read(fields)
    rope = CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields)).rope_parameters
    assert cfg.rope_theta == rope["rope_theta"]
    assert (cfg.rotated or cfg.head_dim) == int(cfg.head_dim * rope.get("partial_rotary_factor", 1.0))
    kinds = {type(None): "default", Llama3Scaling: "llama3", LongRope: "longrope"}
    assert kinds[type(cfg.rope_scaling)] == rope["rope_type"]


@pytest.mark.parametrize("rotated", range(2, 101, 2))
def test_a_written_share_of_rotated_dimensions_is_read_again(rotated):
    cfg = dataclasses.replace(PHI3, head_dim=100, rotated=rotated if rotated < 100 else 0)
    assert int(families.hf_fields(cfg, "phi3")["partial_rotary_factor"] * 100) == rotated


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),
        ("llama", "is_causal", False),  # transformers 5 then reads both ways
        ("llama", "add_cross_attention", True),
        ("llama", "rope_interleaved", True),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "logit_scale", 0.5),
        ("llama", "model_type", "gemma3"),
        ("llama", "num_key_value_heads", 4),
        ("llama", "head_dim", 11),
        ("llama", "rope_parameters", {"rope_type": "yarn"}),
        ("llama", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        ("llama", "rope_parameters", {"partial_rotary_factor": 0.5}),
        ("llama", "rope_parameters", {"mscale": 0.7}),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("phi3", "full_attn_mod", 2),
        ("phi3", "partial_rotary_factor", 0.5),
        ("phi3", "partial_rotary_factor", 2.0),
        ("stablelm", "rope_parameters", {"partial_rotary_factor": 2.0}),
        ("phi3_long", "original_max_position_embeddings", None),
        # Which transformers fills in.
        ("phi3_long", "rope_scaling", {"short_factor": None}),
        ("phi3_long", "rope_scaling", {"original_max_position_embeddings": 29}),  # beside it there are 23
        ("llama31", "rope_scaling", {"original_max_position_embeddings": None}),
        ("llama31", "rope_scaling", {"low_freq_factor": None}),
        ("stablelm", "use_parallel_residual", True),
        ("stablelm", "qk_layernorm", True),
    ],
)
def test_field_that_changes_the_mathematics_is_refused_by_name(family, key, value):
    fields, named = fields_of(FAMILIES[family]), key
    assert read(fields) == FAMILIES[family]
    if isinstance(value, dict) and key != "quantization_config":
        named, value = "|".join(value), (fields.get(key) or {}) | value
    with pytest.raises(UserError, match=rf"here\.json.*({named})"):
        read(fields | {key: value})


# What transformers 4 writes besides a class's own fields, with its defaults; and what others leave in published files.
OLD = {
    "_name_or_path": "here",
    "add_cross_attention": False,
    "id2label": {"0": "LABEL_0"},
    "is_encoder_decoder": False,
    "max_length": 4096,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "quantization_config": None,
    "temperature": 0.6,
    "use_sliding_window": False,
    "also_of_a_later_version": [],
}
UNSAID = dict.fromkeys(("hidden_act", "attention_bias", "tie_word_embeddings", "original_max_position_embeddings"))


@pytest.mark.parametrize("kind", [*families.FAMILIES, "bert"])
@pytest.mark.parametrize("extra", [{}, OLD, UNSAID], ids=["new", "old", "null"])
def test_every_field_that_transformers_writes_by_default_is_passed_over(tmp_path, kind, extra):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    fields = CONFIG_MAPPING[kind](**sizes).to_dict() | extra
    if kind == "bert":
        fields = {key: fields[key] for key in fields.keys() - {"pretraining_tp", "num_key_value_heads"}}
    elif extra is OLD:
        fields |= {"rope_theta": 1e4, "is_decoder": True, "layer_types": ["full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    cfg = (weights.describe_bert if kind == "bert" else weights.describe)(tmp_path)
    assert (cfg.width, cfg.layers) == (64, 2)


def test_longrope_is_written_in_the_three_fields_that_transformers_4_takes_where_they_say_all():
    fields = fields_of(PHI3_LONG) | {"max_position_embeddings": 23 * 32}
    assert set(fields["rope_scaling"]) == {"type", "short_factor", "long_factor", "attention_factor"}, "its own gain"
    del fields["rope_scaling"]["attention_factor"]
    cfg = read(fields)
    assert fields_of(cfg)["rope_scaling"] == fields["rope_scaling"] and read(fields_of(cfg)) == cfg


def test_longrope_s_gain_follows_from_how_far_the_context_was_stretched():
    fields = fields_of(PHI3_LONG) | {"max_position_embeddings": 23 * 32}
    rope = {key: value for key, value in fields["rope_scaling"].items() if key != "attention_factor"}
    assert read(fields | {"rope_scaling": rope}).rope_scaling.gain == pytest.approx((1 + 5 / np.log2(23)) ** 0.5)
    with pytest.raises(UserError, match=r"here\.json: original_max_position_embeddings=1: "):
        read(fields | {"rope_scaling": rope, "original_max_position_embeddings": 1})
    with pytest.raises(UserError, match=r"short_factor has 3 numbers; one for each of 2"):
        read(fields | {"rope_scaling": rope | {"short_factor": [1.0, 1.0, 1.0]}})
