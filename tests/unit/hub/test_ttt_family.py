"""TTT models as files: every field that is read or refused, by name, and the tensors of the authors' layout."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lw_jax.core.errors import UserError
from lw_jax.hub import ttt_family, weights
from lw_jax.hub.families import HARMLESS
from lw_jax.models import ttt
from lw_jax.models.ttt import TTTConfig

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


@pytest.mark.parametrize("cfg", [SMALL, OTHER, MIXED])
def test_configuration_survives_its_file(cfg):
    assert all(getattr(OTHER, field.name) != getattr(SMALL, field.name) for field in dataclasses.fields(TTTConfig)
               if field.name != "rows"), "a field that is not different is not tested"  # fmt: skip
    fields = json.loads(json.dumps(ttt_family.hf_fields(cfg)))
    assert ttt_family.ttt_config(fields) == cfg
    assert ttt_family.hf_fields(dataclasses.replace(cfg, rows=64)) == ttt_family.hf_fields(cfg)


def test_silent_file_means_what_the_authors_class_takes():
    assert ttt_family.ttt_config(FIELDS) == SMALL
    assert ttt_family.ttt_config(FIELDS | dict.fromkeys(ttt_family._READ)) == SMALL
    assert (SMALL.inner, SMALL.base_rate, SMALL.chunk, SMALL.kernel) == ("linear", 1.0, 16, 4)
    assert (SMALL.rope_theta, SMALL.norm_eps, SMALL.tied) == (1e4, 1e-6, True)
    assert (SMALL.pre_conv, SMALL.share_qk, SMALL.gate) == (False, False, False)


def test_fields_that_change_nothing_are_passed_over():
    more = {"max_position_embeddings": 2048, "pretraining_tp": 1, "scan_checkpoint_group_size": 4, "use_cache": False}
    more |= {"hidden_act": "silu", "is_encoder_decoder": False}
    assert "use_cache" in HARMLESS
    for field, value in (more | dict.fromkeys(HARMLESS, "any")).items():
        assert ttt_family.ttt_config(FIELDS | {field: value}) == SMALL, field


def test_rates_may_be_written_as_whole_numbers():
    found = ttt_family.ttt_config(FIELDS | {"ttt_base_lr": 2, "rope_theta": 10000})
    assert [(type(x), x) for x in (found.base_rate, found.rope_theta)] == [(float, 2.0), (float, 1e4)]


REFUSED = [
    ({"model_type": "llama"}, "model_type='llama'.*'ttt'"),
    ({"model_type": None}, "model_type=None"),
    ({"ttt_reg": 0.1}, "field ttt_reg=0.1 is not known for model_type 'ttt'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu', only 'silu'"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
    ({"ttt_layer_type": "conv"}, "ttt_layer_type='conv', known are 'linear' and 'mlp'"),
    ({"ttt_layer_type": 3}, "ttt_layer_type=3: "),
    ({"pre_conv": "true"}, "pre_conv='true'"),
    ({"share_qk": 1}, "share_qk=1: "),
    ({"use_gate": 0.0}, "use_gate=0.0: "),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
    ({"mini_batch_size": 0}, "mini_batch_size=0: "),
    ({"mini_batch_size": 2.5}, "mini_batch_size=2.5: "),
    ({"conv_kernel": True}, "conv_kernel=True"),
    ({"conv_kernel": -4}, "conv_kernel=-4"),
    ({"ttt_base_lr": "1"}, "ttt_base_lr='1'"),
    ({"ttt_base_lr": float("nan")}, "ttt_base_lr=nan"),
    ({"rope_theta": 0}, "rope_theta=0"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
    ({"vocab_size": "37"}, "vocab_size='37'"),
    ({"vocab_size": 37.0}, "vocab_size=37.0"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    ({"hidden_size": None}, "hidden_size=None"),
    ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ({"num_attention_heads": 5}, "hidden_size=12 .*num_attention_heads=5"),
    ({"num_attention_heads": 4}, "hidden_size=12 .*num_attention_heads=4"),  # heads of width 3
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_field_that_cannot_be_is_refused_by_name(change, message):
    with pytest.raises(UserError, match=message) as caught:
        ttt_family.ttt_config(FIELDS | change, where="folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"model_type"}))
def test_missing_size_is_named(name):
    with pytest.raises(UserError, match=f"field {name} is missing"):
        ttt_family.ttt_config({key: value for key, value in FIELDS.items() if key != name})


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


def edit(folder: Path, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_equal(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), ours, theirs)


@pytest.mark.parametrize("cfg", [SMALL, OTHER, MIXED])
def test_saved_model_loads_back_unchanged(cfg, tmp_path):
    params = random(cfg)
    weights.save_ttt(tmp_path, params, cfg)
    assert weights.is_ttt(tmp_path) and weights.describe_ttt(tmp_path) == cfg
    assert_equal(weights.load_ttt(tmp_path), params)


def test_every_leaf_has_one_official_tensor_of_as_many_numbers(tmp_path):
    for cfg in (SMALL, OTHER, MIXED):
        weights.save_ttt(tmp_path, random(cfg), cfg)
        stored = load_file(tmp_path / "model.safetensors")
        assert sum(each.size for each in stored.values()) == sum(leaf.size for leaf in jax.tree.leaves(random(cfg)))
    # Shapes as the authors' class has them, of the last one and of the one with convolutions.
    ttt_layer = "model.layers.1.seq_modeling_block."
    assert stored[ttt_layer + "learnable_ttt_lr_weight"].shape == (3, 1, 12)
    assert stored[ttt_layer + "learnable_ttt_lr_bias"].shape == (3, 1)
    assert stored[ttt_layer + "W1"].shape == (3, 4, 4) and stored[ttt_layer + "b1"].shape == (3, 1, 4)
    assert stored[ttt_layer + "conv_q.weight"].shape == (12, 1, 4)
    assert ttt_layer + "k_proj.weight" not in stored and ttt_layer + "g_proj.weight" not in stored
    found = ttt_family.tensor_map(OTHER)
    assert found["model.layers.2.conv.conv.weight"].shape == (20, 1, 3)
    assert found["model.layers.0.seq_modeling_block.b2"].shape == (2, 1, 10)
    assert found["model.layers.0.seq_modeling_block.W2"].shape == (2, 40, 10)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_any_stored_float_is_read_into_fp32_and_cast_where_asked(dtype, saved):
    folder, params = saved
    edit(folder, lambda tensors: tensors.update({name: value.astype(dtype) for name, value in tensors.items()}))
    found = weights.load_ttt(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    assert_equal(found, params)
    narrow = weights.load_ttt(folder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {np.dtype(ml_dtypes.bfloat16)}


def test_model_in_several_files_with_an_index_is_the_same(saved):
    folder, params = saved
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, table = sorted(tensors), {}
    for part in range(3):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        table |= dict.fromkeys(names[part::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    assert_equal(weights.load_ttt(folder), params)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match="names model-1.safetensors, which is not in"):
        weights.load_ttt(folder)


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
    assert_equal(weights.load_ttt(folder), params)
    edit(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((5, 7), 9.0))
    with pytest.raises(UserError, match="lm_head.weight differs from the embedding.*set tie_word_embeddings to false"):
        weights.load_ttt(folder)
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(fields))
    assert weights.load_ttt(folder)["head"][5, 7] == 9.0


def test_buffers_that_follow_from_the_configuration_are_left_out(saved):
    folder, params = saved
    block = "model.layers.0.seq_modeling_block."
    buffers = {block + "token_idx": np.ones(16, np.float32), block + "rotary_emb.inv_freq": np.ones(2, np.float32)}
    edit(folder, lambda tensors: tensors.update(buffers))
    assert_equal(weights.load_ttt(folder), params)


Q = "model.layers.1.seq_modeling_block.q_proj.weight"
WRONG = {
    "missing": (lambda tensors: tensors.pop(Q), f"tensor {Q} is missing"),
    "extra": (lambda tensors: tensors.update(extra=np.ones(3, np.float32)), "tensor extra belongs to no known part"),
    "of the other backbone": (
        lambda tensors: tensors.update({Q.replace("q_proj", "g_proj"): np.ones((12, 12), np.float32)}),
        "g_proj.weight belongs to no known part",
    ),
    "turned": (lambda tensors: tensors.update({Q: np.ones((12, 1, 12), np.float32)}), f"{Q} has shape"),
    "without its axis": (
        lambda tensors: tensors.update({Q.replace("q_proj.weight", "b1"): np.ones((3, 4), np.float32)}),
        r"b1 has shape \(3, 4\), the configuration asks for \(3, 1, 4\)",
    ),
    "of integers": (lambda tensors: tensors.update({Q: np.ones((12, 12), np.int32)}), f"{Q} is stored as I32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensor_is_refused_by_name(name, saved):
    folder, _ = saved
    change, message = WRONG[name]
    edit(folder, change)
    with pytest.raises(UserError, match=message):
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
    for text, message in (("{", "config.json: broken JSON"), ("[1]", "config.json: expected object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            weights.describe_ttt(folder)


def test_weights_land_in_their_shards(saved):
    from sharding import mesh as meshes
    from sharding import rules, tables

    folder, params = saved
    mesh = meshes.make(data=4)
    placed = rules.shardings(tables.LEARNER_FSDP, ttt.abstract(SMALL), mesh, name="ttt")
    found = weights.load_ttt(folder, shardings=placed)
    assert_equal(found, params)
    assert found["layers"]["q"].sharding.shard_shape((2, 12, 12)) == (2, 12, 3)
    assert found["embed"].sharding.shard_shape((37, 12)) == (37, 3)
