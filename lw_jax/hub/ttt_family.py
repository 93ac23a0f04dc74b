"""TTT checkpoints in the authors' PyTorch layout: the fields of config.json that are read, and tensor names."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lw_jax.core.errors import UserError
from lw_jax.core.schema import Size
from lw_jax.hub import config_json
from lw_jax.hub.config_json import Layers, Positive
from lw_jax.hub.families import HARMLESS, Row, Slot, list_slots, refuse_fields
from lw_jax.models.ttt import TTTConfig, abstract

MODEL_TYPE = "ttt"


class _Fields(msgspec.Struct, frozen=True):
    """The fields of config.json that are read, under their names in TTTConfig.

    Null and absent mean what the authors' class takes, and so TTTConfig.
    """

    vocab: Size = msgspec.field(name="vocab_size")
    width: Size = msgspec.field(name="hidden_size")
    ffn: Size = msgspec.field(name="intermediate_size")
    layers: Layers = msgspec.field(name="num_hidden_layers")
    heads: Size = msgspec.field(name="num_attention_heads")
    inner: Literal["linear", "mlp"] | None = msgspec.field(name="ttt_layer_type", default=None)
    base_rate: Positive | None = msgspec.field(name="ttt_base_lr", default=None)
    chunk: Size | None = msgspec.field(name="mini_batch_size", default=None)
    pre_conv: bool | None = None
    share_qk: bool | None = None
    gate: bool | None = msgspec.field(name="use_gate", default=None)
    kernel: Size | None = msgspec.field(name="conv_kernel", default=None)
    rope_theta: Positive | None = None
    norm_eps: Positive | None = msgspec.field(name="rms_norm_eps", default=None)
    tied: bool | None = msgspec.field(name="tie_word_embeddings", default=None)


_REQUIRED = config_json.names(_Fields, required=True)
_MUST_EQUAL: dict[str, Any] = {"hidden_act": "silu", "is_encoder_decoder": False}
# How training is cut up, and the length it was meant for: rotary positions begin anew in every chunk.
_HARMLESS = HARMLESS | {"max_position_embeddings", "model_type", "pretraining_tp", "scan_checkpoint_group_size"}
_LAYER, _TTT = "model.layers.{}.", "model.layers.{}.seq_modeling_block."
TENSORS = {
    "embed": Row("model.embed_tokens.weight"),
    "norm": Row("model.norm.weight"),
    "head": Row("lm_head.weight"),
    "layers/seq_norm": Row(_LAYER + "seq_norm.weight"),
    "layers/ffn_norm": Row(_LAYER + "ffn_norm.weight"),
    "layers/gate": Row(_LAYER + "mlp.gate_proj.weight"),
    "layers/up": Row(_LAYER + "mlp.up_proj.weight"),
    "layers/down": Row(_LAYER + "mlp.down_proj.weight"),
    "layers/before_norm": Row(_LAYER + "conv.norm.weight"),
    "layers/before_conv": Row(_LAYER + "conv.conv.weight"),
    "layers/before_conv_bias": Row(_LAYER + "conv.conv.bias"),
    "layers/q": Row(_TTT + "q_proj.weight"),
    "layers/k": Row(_TTT + "k_proj.weight"),
    "layers/v": Row(_TTT + "v_proj.weight"),
    "layers/o": Row(_TTT + "o_proj.weight"),
    "layers/out_gate": Row(_TTT + "g_proj.weight"),
    "layers/q_conv": Row(_TTT + "conv_q.weight"),
    "layers/q_conv_bias": Row(_TTT + "conv_q.bias"),
    "layers/k_conv": Row(_TTT + "conv_k.weight"),
    "layers/k_conv_bias": Row(_TTT + "conv_k.bias"),
    "layers/rate": Row(_TTT + "learnable_ttt_lr_weight"),
    "layers/rate_bias": Row(_TTT + "learnable_ttt_lr_bias"),
    "layers/token": Row(_TTT + "learnable_token_idx"),
    "layers/inner_norm": Row(_TTT + "ttt_norm_weight"),
    "layers/inner_norm_bias": Row(_TTT + "ttt_norm_bias"),
    "layers/post_norm": Row(_TTT + "post_norm.weight"),
    "layers/post_norm_bias": Row(_TTT + "post_norm.bias"),
    "layers/w1": Row(_TTT + "W1"),
    "layers/b1": Row(_TTT + "b1"),
    "layers/w2": Row(_TTT + "W2"),
    "layers/b2": Row(_TTT + "b2"),
}
# Leaves whose stored form has one more axis, of size 1, at this place.
_SINGLE = {"rate": 1, "rate_bias": 1, "b1": 1, "b2": 1, "before_conv": 1, "q_conv": 1, "k_conv": 1}


def tensor_map(cfg: TTTConfig) -> dict[str, Slot]:
    slots = list_slots(abstract(cfg), TENSORS, "hugging_face")
    for name, slot in slots.items():
        if (axis := _SINGLE.get(slot.path[-1])) is not None:
            slots[name] = slot._replace(shape=(*slot.shape[:axis], 1, *slot.shape[axis:]))
    return slots


def ttt_config(fields: Mapping[str, Any], *, where: str = "config.json") -> TTTConfig:
    """Returns a model's configuration from the fields of its config.json.

    Raises UserError for another family, a missing size, and a field of the wrong kind or that changes the mathematics.
    """
    if fields.get("model_type") != MODEL_TYPE:
        raise UserError(f"{where}: model_type={fields.get('model_type')!r:.80}, a TTT model states {MODEL_TYPE!r}")
    free = config_json.names(_Fields) | _HARMLESS
    refuse_fields(fields, required=_REQUIRED, must=_MUST_EQUAL, free=free, where=where)
    stated = msgspec.structs.asdict(config_json.check(fields, _Fields, where))
    cfg = TTTConfig(**{name: value for name, value in stated.items() if value is not None})
    if cfg.width % cfg.heads or cfg.head_dim % 2:
        raise UserError(
            f"{where}: impossible sizes: hidden_size={cfg.width} must be an even multiple of "
            f"num_attention_heads={cfg.heads}; fetch the file again"
        )
    return cfg


def hf_fields(cfg: TTTConfig) -> dict[str, Any]:
    """Returns the fields of config.json that describe `cfg`, without the padding of the table."""
    return {
        "architectures": ["TTTForCausalLM"],
        "model_type": MODEL_TYPE,
        "hidden_act": "silu",
        **{field.encode_name: getattr(cfg, field.name) for field in msgspec.structs.fields(_Fields)},
    }
