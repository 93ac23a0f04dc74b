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
TENSORS = {
    "embed": Row("embeddings.word_embeddings.weight"),
    "position_embed": Row("embeddings.position_embeddings.weight"),
    "type_embed": Row("embeddings.token_type_embeddings.weight"),
    "embed_norm": Row("embeddings.LayerNorm.weight"),
    "embed_norm_bias": Row("embeddings.LayerNorm.bias"),
    "layers/q": Row(_LAYER + "attention.self.query.weight", split=0),
    "layers/q_bias": Row(_LAYER + "attention.self.query.bias", split=0),
    "layers/k": Row(_LAYER + "attention.self.key.weight", split=0),
    "layers/k_bias": Row(_LAYER + "attention.self.key.bias", split=0),
    "layers/v": Row(_LAYER + "attention.self.value.weight", split=0),
    "layers/v_bias": Row(_LAYER + "attention.self.value.bias", split=0),
    "layers/o": Row(_LAYER + "attention.output.dense.weight", split=1),
    "layers/o_bias": Row(_LAYER + "attention.output.dense.bias"),
    "layers/attn_norm": Row(_LAYER + "attention.output.LayerNorm.weight"),
    "layers/attn_norm_bias": Row(_LAYER + "attention.output.LayerNorm.bias"),
    "layers/up": Row(_LAYER + "intermediate.dense.weight"),
    "layers/up_bias": Row(_LAYER + "intermediate.dense.bias"),
    "layers/down": Row(_LAYER + "output.dense.weight"),
    "layers/down_bias": Row(_LAYER + "output.dense.bias"),
    "layers/mlp_norm": Row(_LAYER + "output.LayerNorm.weight"),
    "layers/mlp_norm_bias": Row(_LAYER + "output.LayerNorm.bias"),
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


def bert_config(fields: Mapping[str, Any], *, where: str) -> BertConfig:
    """Returns the body's configuration from the fields of its config.json.

    Raises UserError for another family, a missing size, and a field that changes the mathematics.
    """
    if fields.get("model_type") != "bert":
        raise UserError(
            f"{where}: model_type={fields.get('model_type')!r:.80}; encoder.kind 'bert' reads model_type 'bert' "
            "(MiniLM and other BERT-class bodies state it too); a Llama or Qwen body is encoder.kind 'lm'"
        )
    refuse_fields(fields, required=_REQUIRED, must=_MUST_EQUAL, free=_REQUIRED | _HARMLESS, where=where)
    cfg = BertConfig(**msgspec.structs.asdict(config_json.check(fields, _Fields, where)))
    if cfg.width % cfg.heads:
        raise UserError(
            f"{where}: impossible sizes: hidden_size={cfg.width} must be a multiple of "
            f"num_attention_heads={cfg.heads}; fetch the file again"
        )
    return cfg
