"""Low-rank adapters beside a frozen decoder's matrices (LoRA, Hu et al. 2021): y + alpha / rank x b (a x).

Parameters, fp32, layers stacked as the decoder's: {"layers": {name: {"a": [l r in..], "b": [l out.. r]}}}.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lw_jax.core.config import suggest
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.models import quant
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.decoder import abstract as describe_decoder

# Our names -> the modules of transformers' classes, as users and PEFT write them.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Lora:
    """Matrices with a LoRA pair, and its rank, alpha and dropout."""

    rank: int
    alpha: float
    dropout: float
    names: tuple[str, ...]  # of MODULES

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def match(targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns each target with the matrices it matches: a regex over a module's last or whole name.

    Raises UserError for a target that matches nothing.
    """
    matches, last = {}, {name: module.split(".")[1] for name, module in MODULES.items()}
    for target in targets:
        try:
            pattern = re.compile(target)
        except re.error as error:
            raise UserError(f"config.lora.targets: {target!r} is no regular expression: {error}") from error
        names = [name for name, module in MODULES.items() if pattern.fullmatch(module) or pattern.fullmatch(last[name])]
        if not names:
            known = list(last.values())
            hint = f"{suggest(target, known)} Fused matrices (qkv_proj, gate_up_proj) are split at loading"
            raise UserError(f"config.lora.targets: {target!r} matches no matrix; known are {', '.join(known)}.{hint}.")
        matches[target] = tuple(names)
    return matches


def make(*, rank: int, dropout: float, targets: Sequence[str]) -> Lora:
    """Returns the adapters of a configuration, alpha twice the rank; raises as `match` does."""
    matched = {name for names in match(targets).values() for name in names}
    return Lora(rank, 2.0 * rank, dropout, tuple(name for name in MODULES if name in matched))


def abstract(cfg: DecoderConfig, lora: Lora) -> Tree:
    layers, pairs = describe_decoder(cfg, jnp.float32)["layers"], {}
    for name in lora.names:
        count, *shape = layers[name].shape
        inputs = 2 if name == "o" else 1
        out, into = shape[:-inputs], shape[-inputs:]
        pairs[name] = {
            "a": jax.ShapeDtypeStruct((count, lora.rank, *into), jnp.float32),
            "b": jax.ShapeDtypeStruct((count, *out, lora.rank), jnp.float32),
        }
    return {"layers": pairs}


def init(key: jax.Array, cfg: DecoderConfig, lora: Lora) -> Tree:
    """Draws `a` uniformly within 1 / sqrt(inputs), as PEFT does; `b` is zero, so the model starts unchanged."""
    pairs = abstract(cfg, lora)["layers"]
    drawn = {}
    for name, subkey in zip(pairs, jax.random.split(key, len(pairs)), strict=True):
        shape = pairs[name]["a"].shape
        bound = 1.0 / math.sqrt(math.prod(shape[2:]))
        a = jax.random.uniform(subkey, shape, minval=-bound, maxval=bound)
        drawn[name] = {"a": a, "b": jnp.zeros(pairs[name]["b"].shape)}
    return {"layers": drawn}


def attach(
    params: Tree, pairs: Tree, lora: Lora, *, keys: jax.Array | None = None, training: jax.Array | float = 1.0
) -> Tree:
    """Returns a decoder's parameters with the pairs beside its matrices.

    With `keys` [b], one for each row of the batch, a pair's inputs have dropout of rate `dropout` x `training` (a
    traced 0 or 1). A row's dropout mask depends on its own key alone, not on the other rows.
    """
    layers = dict(params["layers"])
    for number, (name, pair) in enumerate(pairs["layers"].items()):
        beside = {"a": pair["a"], "b": pair["b"] * lora.scale}
        if keys is not None and lora.dropout:
            count = pair["a"].shape[0]
            split = jax.vmap(
                lambda key, number=number, count=count: jax.random.split(jax.random.fold_in(key, number), count)
            )
            beside["keys"] = jax.random.key_data(split(keys)).swapaxes(0, 1)  # [l b ..]: the scan over layers cuts them
            beside["dropout"] = jnp.full((count,), lora.dropout) * training
        layers[f"{name}_lora"] = beside
    return params | {"layers": layers}


@functools.partial(jax.jit, static_argnames="lora", donate_argnums=0)
def merge(params: Tree, pairs: Tree, lora: Lora) -> Tree:
    """Returns the decoder with the pairs added into its matrices, which must not be packed."""
    layers = dict(params["layers"])
    for name, pair in pairs["layers"].items():
        matrix = layers[name]
        a = pair["a"].reshape(*pair["a"].shape[:2], -1)  # [l r in]
        b = pair["b"].reshape(len(pair["b"]), -1, lora.rank)  # [l out r]
        update = jnp.einsum("lor,lri->loi", b, a, precision="highest").reshape(matrix.shape) * lora.scale
        layers[name] = (matrix.astype(jnp.float32) + update).astype(matrix.dtype)
    return params | {"layers": layers}


def unpack(params: Tree, cfg: DecoderConfig, dtype: jax.typing.DTypeLike) -> Tree:
    shapes, layers = describe_decoder(cfg, dtype)["layers"], dict(params["layers"])
    for name in quant.MATRICES:
        if isinstance(layers[name], dict):
            layers[name] = quant.restore(layers[name], dtype).reshape(shapes[name].shape)
    return params | {"layers": layers}
