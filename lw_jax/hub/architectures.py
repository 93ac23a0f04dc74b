"""Shapes of a model without its weights, for plans on a machine that has not fetched them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lw_jax.core.config import suggest
from lw_jax.core.errors import UserError
from lw_jax.hub import licences, sources, weights
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.rotary import Llama3Scaling

_Config = TypeVar("_Config", DecoderConfig, BertConfig)
_VARIANTS = re.compile("-Instruct|-instruct|Meta-|-Chat-v1.0|-Coder")
_LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def _llama(vocab: int, width: int, layers: int, heads: tuple[int, int], ffn: int, **fields: Any) -> DecoderConfig:
    fixed = {"rope_theta": 500000.0, "norm_eps": 1e-5, "max_positions": 131072, "tied": False, "qkv_bias": False}
    sizes = {"vocab": vocab, "width": width, "layers": layers, "ffn": ffn}
    fields = fixed | fields
    return DecoderConfig(heads=heads[0], kv_heads=heads[1], head_dim=width // heads[0], **sizes, **fields)


def _qwen(vocab: int, width: int, layers: int, heads: tuple[int, int], ffn: int, **fields: Any) -> DecoderConfig:
    fixed = {"rope_theta": 1e6, "norm_eps": 1e-6, "max_positions": 32768, "qkv_bias": True}
    return _llama(vocab, width, layers, heads, ffn, **(fixed | fields))


def _smollm(width: int, layers: int, heads: tuple[int, int], ffn: int, rope_theta: float) -> DecoderConfig:
    fields = {"rope_theta": rope_theta, "max_positions": 8192, "tied": True}
    return _llama(49152, width, layers, heads, ffn, **fields)


_LLAMA2 = {"rope_theta": 10000.0}
_LLAMA3_8B = _llama(128256, 4096, 32, (32, 8), 14336, max_positions=8192)
_STABLELM2 = _llama(
    *(100352, 2048, 24, (32, 32), 5632), **_LLAMA2, max_positions=4096, qkv_bias=True, norm="layer", rotated=16
)

# From each model's published config.json. Names as users write them; `find` ignores what _VARIANTS names.
KNOWN = {
    "meta-llama/Llama-3.1-8B": _llama(128256, 4096, 32, (32, 8), 14336, rope_scaling=_LLAMA3),
    "meta-llama/Llama-3-8B": _LLAMA3_8B,
    "meta-llama/Llama-3.2-1B": _llama(
        128256, 2048, 16, (32, 8), 8192, tied=True, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)
    ),
    "meta-llama/Llama-3.2-3B": _llama(
        128256, 3072, 28, (24, 8), 8192, tied=True, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)
    ),
    "Qwen/Qwen2.5-0.5B": _qwen(151936, 896, 24, (14, 2), 4864, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen(151936, 1536, 28, (12, 2), 8960, tied=True),
    "Qwen/Qwen2.5-3B": _qwen(151936, 2048, 36, (16, 2), 11008, tied=True),
    "Qwen/Qwen2.5-7B": _qwen(152064, 3584, 28, (28, 4), 18944),
    "Qwen/Qwen2.5-14B": _qwen(152064, 5120, 48, (40, 8), 13824),
    "HuggingFaceTB/SmolLM2-135M": _smollm(576, 30, (9, 3), 1536, 100000.0),
    "HuggingFaceTB/SmolLM2-360M": _smollm(960, 32, (15, 5), 2560, 100000.0),
    "HuggingFaceTB/SmolLM2-1.7B": _smollm(2048, 24, (32, 32), 8192, 130000.0),
    "TinyLlama/TinyLlama-1.1B": _llama(32000, 2048, 22, (32, 4), 5632, **_LLAMA2, max_positions=2048),
    "lmsys/vicuna-7b-v1.5": _llama(32000, 4096, 32, (32, 32), 11008, **_LLAMA2, max_positions=4096),
    "casperhansen/llama-3-8b-instruct-awq": _LLAMA3_8B,
    "microsoft/Phi-3-mini-4k": _llama(32064, 3072, 32, (32, 32), 8192, **_LLAMA2, max_positions=4096, window=2047),
    "stabilityai/stablelm-2-zephyr-1_6b": _STABLELM2,
    "stabilityai/stablelm-2-1_6b": _STABLELM2,
}
KNOWN_BERT = {
    "google-bert/bert-base-uncased": BertConfig(30522, 768, 12, 12, 3072, 1e-12, 512, 2),
    "sentence-transformers/all-MiniLM-L6-v2": BertConfig(30522, 384, 6, 12, 1536, 1e-12, 512, 2),
}


def find(source: str) -> DecoderConfig:
    """Returns the shapes of a model: from its files, else from the table here, else from the hub.

    The rope, norm and position fields of a known model are its own too, but only its shapes are promised. Raises
    UserError for a model that is not here, not known, and whose config.json cannot be fetched.
    """
    return _find(source, KNOWN, weights.describe)


def find_bert(source: str) -> BertConfig:
    """Returns the shapes of a BERT-class body, as `find` does those of a model."""
    return _find(source, KNOWN_BERT, weights.describe_bert)


def _find(source: str, known: Mapping[str, _Config], describe: Callable[[Path], _Config]) -> _Config:
    name = licences.repository(source) or source
    config = known.get(name) or known.get(_VARIANTS.sub("", name))
    if config and source.startswith("pypi:"):  # its one file is not fetched for them
        return config
    if path := sources.cached(source, "config.json"):
        return describe(path)
    if config:
        return config
    try:
        path = sources.locate(source, files=["config.json"])
    except UserError as error:
        hint = f"{suggest(source, known)} Name a folder with config.json, or one of {', '.join(known)}"
        raise UserError(f"{error}.{hint}") from error
    return describe(path)
