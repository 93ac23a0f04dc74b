"""LoRA pairs written as an adapter folder of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors."""

import json
from pathlib import Path

import jax
import numpy as np

from lw_jax.core.files import whole
from lw_jax.core.types import Tree
from lw_jax.hub import families
from lw_jax.hub.tensor_files import write_safetensors
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.lora import MODULES, Lora

_PREFIX = "base_model.model.model.layers"
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
Matrices = list[tuple[np.ndarray, np.ndarray]]  # of each layer, [r in] and [out r]


def save(folder: Path, pairs: Tree, spec: Lora, *, cfg: DecoderConfig, model_type: str, base: str) -> None:
    """Writes the pairs as a PEFT adapter of the model `base`, a decoder of this shape.

    Where the family stores several matrices as one (Phi-3), their pairs become one of as many ranks, block by block;
    a matrix without a pair has zeros.
    """
    modules, tensors = {}, {}
    for name, pair in jax.device_get(pairs)["layers"].items():
        layers = zip(pair["a"], pair["b"], strict=True)
        modules[MODULES[name]] = [(a.reshape(len(a), -1), b.reshape(-1, b.shape[-1])) for a, b in layers]
    ranks, alphas = {}, {}
    for module, layers in (_fuse(modules, cfg) if families.FAMILIES[model_type].fused else modules).items():
        for layer, (a, b) in enumerate(layers):
            tensors[f"{_PREFIX}.{layer}.{module}.lora_A.weight"] = np.ascontiguousarray(a)
            tensors[f"{_PREFIX}.{layer}.{module}.lora_B.weight"] = np.ascontiguousarray(b)
        last, rank = module.split(".")[1], layers[0][0].shape[0]
        if rank != spec.rank:
            ranks[last], alphas[last] = rank, spec.scale * rank
    saved = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Both are written before one that is there is replaced.
    with whole(folder / _CONFIG) as config, whole(folder / _TENSORS) as stored:
        write_safetensors(stored, tensors, layout="pt")
        config.write_text(json.dumps(saved, indent=2) + "\n", "utf-8")


def _fuse(modules: dict[str, Matrices], cfg: DecoderConfig) -> dict[str, Matrices]:
    """Joins the pairs of matrices that are stored as one: a's below each other, b's as blocks on a diagonal.

    A part without a pair is a block of zeros and adds no rank.
    """
    heads, inputs = {"q": cfg.heads, "k": cfg.kv_heads, "v": cfg.kv_heads}, np.zeros((0, cfg.width), np.float32)
    sizes = {name: count * cfg.head_dim for name, count in heads.items()} | {"gate": cfg.ffn, "up": cfg.ffn}
    nothing = {MODULES[name]: (inputs, np.zeros((size, 0), np.float32)) for name, size in sizes.items()}
    out = {module: layers for module, layers in modules.items() if module not in nothing}
    for fused, parts in families.FUSED.items():
        if not any(part in modules for part in parts):
            continue
        layers = zip(*(modules.get(part, [nothing[part]] * cfg.layers) for part in parts), strict=True)
        out[fused] = [
            (np.concatenate([a for a, _ in pairs]), np.asarray(jax.scipy.linalg.block_diag(*(b for _, b in pairs))))
            for pairs in layers
        ]
    return out
