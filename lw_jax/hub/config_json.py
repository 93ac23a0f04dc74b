"""Types and bounds of every field that is read of a model's config.json, checked before anything is built.

The bounds lie far above every published model and far below what a loop over layers or a size in bytes cannot bear.
Fields that must have one value, and those that are unknown, are `families.refuse_fields`' part.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from lw_jax.core import schema

Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # an axis of a layer's matrix
Vocab = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Window = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # 0: none
Original = Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)]  # positions; its logarithm is divided by
Theta = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Epsilon = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Factors = Annotated[tuple[Factor, ...], msgspec.Meta(max_length=2**16)]

_T = TypeVar("_T", bound=msgspec.Struct)


class Kind(msgspec.Struct, frozen=True):
    """Model class of a config.json."""

    model_type: str | None = None


class Rope(msgspec.Struct, frozen=True):
    """Rotary frequencies, in the spelling of `rope_scaling` or of `rope_parameters`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: Share | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    attention_factor: Factor | None = None
    original_max_position_embeddings: Original | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None


class Packing(msgspec.Struct, frozen=True):
    """Stored quantisation, as AutoAWQ states it."""

    quant_method: str | None = None
    version: str | None = None
    bits: int | None = None
    group_size: int | None = None
    zero_point: bool | None = None
    modules_to_not_convert: tuple[str, ...] | None = None


class Decoder(msgspec.Struct, frozen=True):
    """A reader's config.json; its family decides which optional fields are required."""

    model_type: str
    vocab_size: Vocab
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    intermediate_size: Width
    max_position_embeddings: schema.Size
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    rms_norm_eps: Epsilon | None = None
    layer_norm_eps: Epsilon | None = None
    tie_word_embeddings: bool | None = None
    use_qkv_bias: bool | None = None
    rope_theta: Theta | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Original | None = None
    sliding_window: Window | None = None
    max_window_layers: Window | None = None
    layer_types: Annotated[tuple[str, ...], msgspec.Meta(max_length=4096)] | None = None
    quantization_config: Packing | None = None


class Bert(msgspec.Struct, frozen=True):
    """A BERT-class body's config.json."""

    vocab_size: Vocab
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    intermediate_size: Width
    layer_norm_eps: Epsilon
    max_position_embeddings: schema.Size
    type_vocab_size: Width


class TTT(msgspec.Struct, frozen=True):
    """A TTT model's config.json; null and absent mean what the authors' class takes."""

    vocab_size: Vocab
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    ttt_layer_type: str | None = None
    ttt_base_lr: Factor | None = None
    mini_batch_size: Width | None = None
    pre_conv: bool | None = None
    share_qk: bool | None = None
    use_gate: bool | None = None
    conv_kernel: Width | None = None
    rope_theta: Theta | None = None
    rms_norm_eps: Epsilon | None = None
    tie_word_embeddings: bool | None = None


class Gguf(msgspec.Struct, frozen=True):
    """The metadata of a GGUF model that are read, without the architecture in front of their names."""

    block_count: Layers
    context_length: schema.Size
    embedding_length: Width
    feed_forward_length: Width
    head_count: Width = msgspec.field(name="attention.head_count")
    epsilon: Epsilon = msgspec.field(name="attention.layer_norm_rms_epsilon")
    head_count_kv: Width | None = msgspec.field(name="attention.head_count_kv", default=None)
    key_length: Width | None = msgspec.field(name="attention.key_length", default=None)
    value_length: Width | None = msgspec.field(name="attention.value_length", default=None)
    dimension_count: Width | None = msgspec.field(name="rope.dimension_count", default=None)
    freq_base: Theta | None = msgspec.field(name="rope.freq_base", default=None)


def check(fields: Mapping[str, Any], kind: type[_T], where: str) -> _T:
    """Returns the fields as `kind`; raises UserError that names file, field, value and rule."""
    return schema.convert(dict(fields), kind, where=where, remedy="correct the field, or fetch the file again")


def is_stated(value: Any) -> bool:
    """Returns whether a field's value differs from an absent one's: null, false and empty say nothing."""
    return value is not None and value is not False and value not in ("", [], {})


def shorten(value: Any) -> str:
    """Returns a value for a message, at most 80 characters of it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
