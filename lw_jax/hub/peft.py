"""LoRA pairs as an adapter folder of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.core.files import whole
from lw_jax.core.types import Tree
from lw_jax.hub import families
from lw_jax.hub.config_json import is_stated
from lw_jax.hub.tensor_files import FLOATS, read_safetensors, read_tensor, write_safetensors
from lw_jax.models import lora
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.lora import MODULES, Lora

_PREFIX = "base_model.model.model.layers"
_NAME = re.compile(re.escape(_PREFIX) + r"\.\d+\.\w+\.\w+\.lora_[AB]\.weight")
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_REMEDY = "name an adapter folder of PEFT"
_Alpha = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class _Adapter(msgspec.Struct, frozen=True):
    r: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    lora_alpha: _Alpha
    peft_type: str | None = None
    bias: str = "none"
    lora_dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    init_lora_weights: bool | str | None = None


# These starts leave the base model as it is; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take something from it.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Of training alone, or stated again by the tensors.
_HARMLESS = frozenset(
    """
    auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode layers_pattern
    loftq_config lora_ga_config megatron_core peft_version qalora_group_size rank_pattern revision runtime_config
    target_modules task_type
    """.split()
)


def save(folder: Path, pairs: Tree, spec: Lora, *, cfg: DecoderConfig, model_type: str, base: str) -> None:
    """Writes the pairs as a PEFT adapter of the model `base`, a decoder of this shape.

    Where the family stores several matrices as one (Phi-3), their pairs become one of as many ranks, block by block;
    a matrix without a pair has zeros.
    """
    modules, tensors = {}, {}
    for name, pair in jax.device_get(pairs)["layers"].items():
        modules[MODULES[name]] = [_matrices(pair, layer) for layer in range(pair["a"].shape[0])]
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


def load(folder: Path, cfg: DecoderConfig) -> tuple[Tree, Lora]:
    """Returns the pairs of an adapter folder for a decoder of this shape, fused ones split.

    Raises:
        UserError: no such folder, another kind of adapter, or tensors that do not fit the decoder.
    """
    saved = _read_config(folder / _CONFIG)
    stored = _read_tensors(folder / _TENSORS)
    spec = Lora(saved.r, float(saved.lora_alpha), float(saved.lora_dropout or 0.0), ())
    pairs: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, (a, b, scale) in _collect(folder, stored, saved, cfg).items():
        with np.errstate(over="ignore"):
            scaled = [one * (scale / spec.scale) for one in b]
        if not all(np.isfinite(one).all() for one in scaled):
            raise UserError(f"{folder}: {MODULES[name]} times its alpha is too large for fp32; {_REMEDY}")
        pairs[name] = {"a": a, "b": scaled}
    names = tuple(name for name in MODULES if name in pairs)
    tree = {}
    for name in names:
        rank = pairs[name]["a"][0].shape[0]
        shapes = lora.abstract(cfg, Lora(rank, spec.alpha, 0.0, (name,)))["layers"][name]
        tree[name] = {part: _stack(folder, name, pairs[name][part], shapes[part]) for part in ("a", "b")}
    return {"layers": tree}, Lora(spec.rank, spec.alpha, spec.dropout, names)


def _read_config(file: Path) -> _Adapter:
    try:
        stated = schema.read(file, dict[str, Any], remedy=_REMEDY)
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; {_REMEDY}") from error
    saved = schema.convert(stated, _Adapter, where=str(file), remedy=_REMEDY)
    if saved.peft_type != "LORA" or saved.bias != "none":
        raise UserError(
            f"{file}: peft_type={saved.peft_type!r:.80}, bias={saved.bias!r:.80}; LORA without bias is read"
        )
    known = {name.split(".")[1] for name in (*MODULES.values(), *families.FUSED)}
    if other := sorted((saved.alpha_pattern or {}).keys() - known):
        raise UserError(f"{file}: alpha_pattern of {other[0]!r:.80}: names of matrices alone are read, as 'q_proj'")
    read = {field.name for field in msgspec.structs.fields(_Adapter)}
    other = sorted(key for key in stated.keys() - read - _HARMLESS if is_stated(stated[key]))
    start = saved.init_lora_weights
    if (start.lower() if isinstance(start, str) else start) not in _STARTS:
        other = ["init_lora_weights"]
    if other:
        raise UserError(
            f"{file}: {other[0]:.80}={stated[other[0]]!r:.80} is not supported: pairs that are added to the base "
            "model as it is are read; train the adapter without it, or convert it with peft"
        )
    return saved


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Returns the matrices of an adapter as fp32, once their names, types and shapes are those of pairs."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; {_REMEDY}")
    found = read_safetensors(file)
    for name, one in found.items():
        if one.kind not in FLOATS or len(one.shape) != 2 or 0 in one.shape or not _NAME.fullmatch(name):
            rule = f"matrices of floats by the name {_PREFIX}.LAYER.MODULE.lora_A.weight are read"
            raise UserError(f"{one.label:.300} is {one.kind} {one.shape}; {rule}")
    return {name: read_tensor(one, np.float32) for name, one in found.items()}


def _collect(
    folder: Path, stored: dict[str, np.ndarray], saved: _Adapter, cfg: DecoderConfig
) -> dict[str, tuple[list[np.ndarray], list[np.ndarray], float]]:
    """Returns name -> (a of each layer, b of each layer, scale)."""
    names = {module: name for name, module in MODULES.items()}
    sizes = _fused_sizes(cfg)
    found: dict[str, tuple[list[np.ndarray], list[np.ndarray], float]] = {}
    modules = {".".join(name.removeprefix(f"{_PREFIX}.").split(".")[1:-2]) for name in stored}
    for module in sorted(modules):
        own = families.FUSED.get(module, (module,))
        if any(part not in names for part in own):
            raise UserError(f"{folder}: an adapter of {module!r}, which is no matrix of a decoder's layer")
        a, b = ([_part(folder, stored, layer, module, part) for layer in range(cfg.layers)] for part in "AB")
        rank, last = a[0].shape[0], module.split(".")[1]
        if any(one.shape[0] != rank for one in a) or any(one.shape[1] != rank for one in b):
            raise UserError(f"{folder}: the pairs of {module} are of several ranks; a pair of one rank a layer is read")
        alpha = (saved.alpha_pattern or {}).get(last, saved.lora_alpha)
        begin = 0
        for part in own:
            name = names[part]
            count = sizes[part] if len(own) > 1 else b[0].shape[0]
            found[name] = (a, [one[begin : begin + count] for one in b], alpha / rank)
            begin += count
    if len(stored) != 2 * cfg.layers * len(modules):
        raise UserError(f"{folder}: {len(stored)} tensors, {len(modules)} modules of {cfg.layers} layers have two each")
    return found


def _part(folder: Path, stored: dict[str, np.ndarray], layer: int, module: str, part: str) -> np.ndarray:
    name = f"{_PREFIX}.{layer}.{module}.lora_{part}.weight"
    if name not in stored:
        raise UserError(f"{folder}: tensor {name} is missing; this adapter is of another model")
    return stored[name]


def _stack(folder: Path, name: str, layers: list[np.ndarray], shape: jax.ShapeDtypeStruct) -> jax.Array:
    sizes = {one.size for one in layers}
    if sizes != {int(np.prod(shape.shape[1:]))}:
        raise UserError(
            f"{folder}: {MODULES[name]} has {sorted(sizes)} values a layer, the model asks for {shape.shape[1:]}"
        )
    return jnp.asarray(np.stack([one.reshape(shape.shape[1:]) for one in layers]))


def _matrices(pair: dict[str, np.ndarray], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns one layer's [r in] and [out r]."""
    a, b = pair["a"][layer], pair["b"][layer]
    return a.reshape(a.shape[0], -1), b.reshape(-1, b.shape[-1])


Matrices = list[tuple[np.ndarray, np.ndarray]]


def _fused_sizes(cfg: DecoderConfig) -> dict[str, int]:
    """Returns the rows of each module that a family may store as a part of another."""
    heads = {"q": cfg.heads, "k": cfg.kv_heads, "v": cfg.kv_heads}
    sizes = {name: count * cfg.head_dim for name, count in heads.items()} | {"gate": cfg.ffn, "up": cfg.ffn}
    return {MODULES[name]: size for name, size in sizes.items()}


def _fuse(modules: dict[str, Matrices], cfg: DecoderConfig) -> dict[str, Matrices]:
    """Joins the pairs of matrices that are stored as one: a's below each other, b's as blocks on a diagonal.

    A part without a pair is a block of zeros and adds no rank.
    """
    sizes = _fused_sizes(cfg)
    out = {
        module: layers
        for module, layers in modules.items()
        if not any(module in own for own in families.FUSED.values())
    }
    for fused, own in families.FUSED.items():
        if not any(part in modules for part in own):
            continue
        nothing = {part: (np.zeros((0, cfg.width), np.float32), np.zeros((sizes[part], 0), np.float32)) for part in own}
        layers = zip(*(modules.get(part, [nothing[part]] * cfg.layers) for part in own), strict=True)
        out[fused] = [
            (np.concatenate([a for a, _ in pairs]), np.asarray(jax.scipy.linalg.block_diag(*(b for _, b in pairs))))
            for pairs in layers
        ]
    return out
