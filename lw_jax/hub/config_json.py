"""Fields of a model's config.json as types: a reader's, and what all families share.

Fields that must have one value, and those that are unknown, are `families.refuse_fields`' part.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from lw_jax.core import schema
from lw_jax.core.schema import Size

Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]  # each is named in a table of tensors
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]  # finite
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

_T = TypeVar("_T", bound=msgspec.Struct)


class Kind(msgspec.Struct, frozen=True):
    """Model class of a config.json, the rows of its embedding table, and its padding."""

    model_type: str | None = None
    vocab_size: Size | None = None
    pad_token_id: schema.Index | None = None


class Rope(msgspec.Struct, frozen=True):
    """Rotary frequencies, in the spelling of `rope_scaling` or of `rope_parameters`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Share | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    short_factor: tuple[Positive, ...] | None = None
    long_factor: tuple[Positive, ...] | None = None

    @property
    def kind(self) -> str:
        kind = self.rope_type or self.type or "default"
        return "longrope" if kind == "su" else kind  # so Phi-3's first files name it


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
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Positive | None = None
    layer_norm_eps: Positive | None = None
    tie_word_embeddings: bool | None = None
    use_qkv_bias: bool | None = None
    rope_theta: Positive | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Size | None = None
    sliding_window: schema.Index | None = None
    layer_types: tuple[str, ...] | None = None
    quantization_config: Packing | None = None


def read_or_default(file: Path, kind: type[_T]) -> _T:
    """Returns a JSON file as `kind`; the kind's defaults where there is no file."""
    try:
        return schema.read(file, kind, remedy="fetch the file again")
    except FileNotFoundError:
        return kind()


def names(kind: type[msgspec.Struct], *, required: bool = False) -> frozenset[str]:
    """Returns the fields of a type as files spell them; those alone that a file must have, where `required`."""
    fields = msgspec.structs.fields(kind)
    return frozenset(field.encode_name for field in fields if field.required or not required)


def check(fields: Mapping[str, Any], kind: type[_T], where: str) -> _T:
    """Returns the fields as `kind`; raises UserError that names file, field, value and rule."""
    return schema.convert(dict(fields), kind, where=where, remedy="correct the field, or fetch the file again")


def is_stated(value: Any) -> bool:
    """Returns whether a field's value differs from an absent one's: null, false and empty say nothing."""
    return value is not None and value is not False and value not in ("", [], {})
