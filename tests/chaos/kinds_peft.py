"""Adapter folders of PEFT."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.tree import flatten_paths
from lw_jax.hub import peft
from lw_jax.models import lora
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.lora import Lora
from tests.chaos import mutations
from tests.chaos.cases import Kind, Sample
from tests.chaos.kinds_model import changed_safetensors, is_finite, join, part
from tests.chaos.mutations import Files

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MODEL = DecoderConfig(
    **{"vocab": 50, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24},
    **{"rope_theta": 1e4, "norm_eps": 1e-5, "max_positions": 64, "tied": True, "qkv_bias": False},
)
SPEC = Lora(rank=2, alpha=4.0, dropout=0.1, names=("q", "v", "down"))


def _write(folder: Path) -> None:
    leaves, treedef = jax.tree.flatten(lora.abstract(MODEL, SPEC))
    draw = np.random.default_rng(0)
    pairs = treedef.unflatten([jnp.asarray(draw.normal(size=leaf.shape), jnp.float32) for leaf in leaves])
    peft.save(folder, pairs, SPEC, cfg=MODEL, model_type="llama", base="base")


def _judge(value: Any, folder: Path, changed: bool) -> str:
    del folder, changed
    pairs, spec = value
    if not is_finite(pairs):
        return "pairs that are NaN or infinite"
    if not (0 < spec.scale <= 1e6 and 0 <= spec.dropout < 1 and spec.names):
        return f"{spec}"
    found = flatten_paths(pairs)
    for name in spec.names:
        rank = found[f"layers/{name}/a"].shape[1]
        shapes = flatten_paths(lora.abstract(MODEL, Lora(rank, 1.0, 0.0, (name,))))
        if other := [path for path in shapes if shapes[path].shape != found[path].shape]:
            return f"{other[0]} {found[other[0]].shape}, the model's {shapes[other[0]].shape}"
    return ""


def _explicit(sample: Sample) -> dict[str, Files]:
    told, (header, data) = json.loads(sample[CONFIG]), part(sample[TENSORS])
    changes: dict[str, dict[str, Any]] = {
        "alpha text": {"lora_alpha": "x"},
        "alpha NaN": {"lora_alpha": "@nan"},
        "alpha 0": {"lora_alpha": 0},
        "rank 0": {"r": 0},
        "rank of digits": {"r": "@digits"},
        "pattern a list": {"alpha_pattern": [1]},
        "pattern of texts": {"alpha_pattern": {"q_proj": "x"}},
        "DoRA": {"use_dora": True},
        "another kind": {"peft_type": "IA3"},
        "kind a list": {"peft_type": []},
        "deep": {"modules_to_save": "@deep"},
    }
    found: dict[str, Files] = {
        name: {CONFIG: mutations.text_of(told | change).encode()} for name, change in changes.items()
    }
    first = next(name for name in header if name != "__metadata__")
    shape = header[first]["shape"]
    for name, change in {"turned": shape[::-1], "one axis": [shape[0] * shape[1]], "three axes": [*shape, 1]}.items():
        changed = header | {first: header[first] | {"shape": change}}
        found[f"tensor {name}"] = {TENSORS: join(json.dumps(changed).encode(), data)}
    found["NaN"] = {TENSORS: join(json.dumps(header).encode(), struct.pack("<f", float("nan")) + data[4:])}
    large = np.full(len(data) // 4, 3e38, np.float32).tobytes()
    loud = mutations.text_of(told | {"alpha_pattern": {"q_proj": 1e6}}).encode()
    found["overflow"] = {TENSORS: join(json.dumps(header).encode(), large), CONFIG: loud}
    return found


KINDS = [
    Kind(
        row="adapter folders of PEFT",
        name="peft",
        write=_write,
        mutate=lambda sample: mutations.files(
            sample,
            {
                CONFIG: [mutations.json_file(sample[CONFIG])] * 4 + [mutations.changed_bytes(sample[CONFIG])],
                TENSORS: [changed_safetensors(sample[TENSORS])] * 2
                + [mutations.changed_bytes(sample[TENSORS], near=900)],
            },
        ),
        load=lambda folder: peft.load(folder, MODEL),
        judge=_judge,
        explicit=_explicit,
        weight=0.6,
    )
]
