"""GGUF files of readers: the metadata that are read or refused, tensor names and row order."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.schema import Size
from lw_jax.hub import config_json, rope_fields
from lw_jax.hub.config_json import Layers, Positive
from lw_jax.hub.families import DEFAULT_THETA, TENSORS, Slot, list_slots
from lw_jax.hub.tensor_files import Stored, read_tensor
from lw_jax.models.decoder import DecoderConfig, abstract
from lw_jax.models.rotary import Llama3Scaling, llama3_factors

ARCHITECTURES = ("llama", "qwen2")
_MUST_EQUAL: dict[str, Any] = {"expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}


class _Fields(msgspec.Struct, frozen=True):
    """The metadata of a GGUF model that are read, without the architecture in front of their names."""

    block_count: Layers
    context_length: Size
    embedding_length: Size
    feed_forward_length: Size
    head_count: Size = msgspec.field(name="attention.head_count")
    epsilon: Positive = msgspec.field(name="attention.layer_norm_rms_epsilon")
    head_count_kv: Size | None = msgspec.field(name="attention.head_count_kv", default=None)
    key_length: Size | None = msgspec.field(name="attention.key_length", default=None)
    value_length: Size | None = msgspec.field(name="attention.value_length", default=None)
    dimension_count: Size | None = msgspec.field(name="rope.dimension_count", default=None)
    freq_base: Positive | None = msgspec.field(name="rope.freq_base", default=None)


_KNOWN = config_json.names(_Fields) | _MUST_EQUAL.keys() | {"vocab_size"}
_FACTOR_TOLERANCE = 1e-4  # relative; the file holds them as fp32


def tensor_map(cfg: DecoderConfig) -> dict[str, Slot]:
    """Returns every tensor of a GGUF file by name; shapes are [out, in] as in the other format."""
    return list_slots(abstract(cfg, jnp.float32), TENSORS, "gguf")


def row_order(cfg: DecoderConfig, architecture: str, path: tuple[str, ...]) -> np.ndarray | None:
    """Returns for each stored row its position in our order, or None where the file has that order.

    Architecture "llama" interleaves the two rotary halves of every head of q and k (row 2i + p holds half p).
    """
    counts: dict[tuple[str, ...], int] = {("layers", "q"): cfg.heads, ("layers", "k"): cfg.kv_heads}
    heads = counts.get(path)
    if architecture != "llama" or heads is None:
        return None
    return np.arange(heads * cfg.head_dim).reshape(heads, 2, cfg.head_dim // 2).swapaxes(1, 2).reshape(-1)


def hf_fields(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, where: str) -> dict[str, Any]:
    """Returns a GGUF file's configuration in Hugging Face fields, for `decoder_config`.

    Raises UserError for another architecture, a part of a split model, and a field that changes the mathematics.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UserError(f"{where}: general.architecture={arch!r:.80}; {sorted(ARCHITECTURES)} are supported")
    if metadata.get("general.type", "model") != "model":
        raise UserError(f"{where}: general.type={metadata['general.type']!r:.80}; only a whole 'model' is a reader")
    if metadata.get("split.count", 1) not in (0, 1):
        field = f"split.count={metadata['split.count']!r:.80}"
        raise UserError(f"{where}: {field}: a part of a model; join them with llama-gguf-split --merge")
    stored = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    for key, value in _MUST_EQUAL.items():
        if stored.get(key, value) != value:
            raise UserError(f"{where}: {arch}.{key}={stored[key]!r:.80}, only {value!r} is supported")
    if unknown := sorted(stored.keys() - _KNOWN):
        field = f"{unknown[0]:.80}={stored[unknown[0]]!r:.80}"
        raise UserError(f"{where}: field {arch}.{field} may change what the model computes")
    if "token_embd.weight" not in tensors:
        raise UserError(f"{where}: tensor token_embd.weight is missing; convert the model again")
    stated = config_json.check(stored, _Fields, f"{where}: {arch}")
    head_dim = _head_dim(stated, where)
    theta = stated.freq_base or DEFAULT_THETA
    return {
        "model_type": arch,
        "num_hidden_layers": stated.block_count,
        "max_position_embeddings": stated.context_length,
        "hidden_size": stated.embedding_length,
        "intermediate_size": stated.feed_forward_length,
        "num_attention_heads": stated.head_count,
        "rms_norm_eps": stated.epsilon,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": stated.head_count_kv or stated.head_count,
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(tensors.get("rope_freqs.weight"), theta, head_dim, where),
    }


def _head_dim(stated: _Fields, where: str) -> int:
    fields = {
        "attention.key_length": stated.key_length,
        "attention.value_length": stated.value_length,
        "rope.dimension_count": stated.dimension_count,
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    if len(set(fields.values())) > 1:
        raise UserError(f"{where}: {fields} differ; heads of one size, rotated whole, are supported")
    return next(iter(fields.values()), stated.embedding_length // stated.head_count)


def _rope(stored: Stored | None, theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Returns the rotary fields; files of Llama 3.1 and later have a tensor of frequency factors."""
    if stored is None:
        return {"rope_type": "default", "rope_theta": theta}
    factors = read_tensor(stored, np.float32)
    # The format keeps only the per-frequency divisors; all published Llama 3.x share the other three numbers, and
    # whether these divisors follow from them is checked.
    scaling = Llama3Scaling(
        factor=float(np.max(factors)), low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    expected = 1.0 / llama3_factors(theta ** -(np.arange(0, head_dim, 2) / head_dim), scaling)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0.0):
        raise UserError(f"{where}: tensor rope_freqs.weight is not the frequency scaling of Llama 3.x; not supported")
    return {"rope_theta": theta} | rope_fields.write_scaling(scaling)
