"""BERT checkpoints: the fields of config.json that are read or refused, and tensor names."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import msgspec

from lw_jax.core.errors import UserError
from lw_jax.core.schema import Size
from lw_jax.hub import config_json
from lw_jax.hub.config_json import Layers, Positive
from lw_jax.hub.families import HARMLESS, Row, Slot, list_slots, refuse_fields
from lw_jax.models.bert import BertConfig, abstract


class _Fields(msgspec.Struct, frozen=True):
    """The fields of config.json that are read, under their names in BertConfig."""

    vocab: Size = msgspec.field(name="vocab_size")
    width: Size = msgspec.field(name="hidden_size")
    layers: Layers = msgspec.field(name="num_hidden_layers")
    heads: Size = msgspec.field(name="num_attention_heads")
    ffn: Size = msgspec.field(name="intermediate_size")
    norm_eps: Positive = msgspec.field(name="layer_norm_eps")
    max_positions: Size = msgspec.field(name="max_position_embeddings")
    token_types: Size = msgspec.field(name="type_vocab_size")


_REQUIRED = config_json.names(_Fields)
# field -> the one value under which the body computes the same; absent or null means that value
_MUST_EQUAL: dict[str, Any] = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "directionality": "bidi",
}
# Of training, of the pooler and of heads, none of which is read here.
_HARMLESS = HARMLESS | {
    "model_type",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "tie_word_embeddings",
}
_LAYER = "encoder.layer.{}."
TENSORS: dict[str, Row] = {
    name: Row(stored, "", split)  # no GGUF: its BERT files are not read
    for name, (stored, split) in {
        "embed": ("embeddings.word_embeddings.weight", None),
        "position_embed": ("embeddings.position_embeddings.weight", None),
        "type_embed": ("embeddings.token_type_embeddings.weight", None),
        "embed_norm": ("embeddings.LayerNorm.weight", None),
        "embed_norm_bias": ("embeddings.LayerNorm.bias", None),
        "layers/q": (_LAYER + "attention.self.query.weight", 0),
        "layers/q_bias": (_LAYER + "attention.self.query.bias", 0),
        "layers/k": (_LAYER + "attention.self.key.weight", 0),
        "layers/k_bias": (_LAYER + "attention.self.key.bias", 0),
        "layers/v": (_LAYER + "attention.self.value.weight", 0),
        "layers/v_bias": (_LAYER + "attention.self.value.bias", 0),
        "layers/o": (_LAYER + "attention.output.dense.weight", 1),
        "layers/o_bias": (_LAYER + "attention.output.dense.bias", None),
        "layers/attn_norm": (_LAYER + "attention.output.LayerNorm.weight", None),
        "layers/attn_norm_bias": (_LAYER + "attention.output.LayerNorm.bias", None),
        "layers/up": (_LAYER + "intermediate.dense.weight", None),
        "layers/up_bias": (_LAYER + "intermediate.dense.bias", None),
        "layers/down": (_LAYER + "output.dense.weight", None),
        "layers/down_bias": (_LAYER + "output.dense.bias", None),
        "layers/mlp_norm": (_LAYER + "output.LayerNorm.weight", None),
        "layers/mlp_norm_bias": (_LAYER + "output.LayerNorm.bias", None),
    }.items()
}
_UNREAD = ("pooler.", "cls.", "embeddings.position_ids")  # beside the body, or following from its sizes


def tensor_map(cfg: BertConfig) -> dict[str, Slot]:
    """Returns every tensor of the body by its present name, without the prefix "bert."."""
    return list_slots(abstract(cfg, jnp.float32), TENSORS, "hugging_face")


def present_name(stored: str) -> str | None:
    """Returns a stored tensor's name in `tensor_map`'s spelling; None for pooler, pretraining head and buffers.

    Files from before 2019's renaming, bert-base-uncased's among them, call a norm's weight gamma and its bias beta.
    """
    name = stored.removeprefix("bert.")
    if name.startswith(_UNREAD):
        return None
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith("LayerNorm" + old):
            return name.removesuffix(old) + new
    return name


def bert_config(fields: Mapping[str, Any], *, raw_keys: set[str], where: str = "config.json") -> BertConfig:
    """Returns the body's configuration from Hugging Face fields; see `families.decoder_config`.

    Raises:
        UserError: another family, a size missing, or a field that changes the mathematics.
    """
    if fields.get("model_type") != "bert":
        raise UserError(
            f"{where}: model_type={fields.get('model_type')!r:.80}; encoder.kind 'bert' reads model_type 'bert' "
            "(MiniLM and other BERT-class bodies state it too); a Llama or Qwen body is encoder.kind 'lm'"
        )
    refuse_fields(fields, raw_keys, required=_REQUIRED, must=_MUST_EQUAL, free=_REQUIRED | _HARMLESS, where=where)
    cfg = BertConfig(**msgspec.structs.asdict(config_json.check(fields, _Fields, where)))
    if cfg.width % cfg.heads:
        raise UserError(
            f"{where}: impossible sizes: hidden_size={cfg.width} must be a multiple of "
            f"num_attention_heads={cfg.heads}; fetch the file again"
        )
    return cfg
