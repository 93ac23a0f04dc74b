"""A text's message of kind "cache": which keys each head keeps, the numbers of their code, and biases; and back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.types import Tree
from lw_jax.models import cache_choice, cache_code, kv_prefix
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_code import Code
from lw_jax.models.decoder import DecoderConfig, KVPrefix

RATIOS = 16  # tables of a reader: from all positions to one of so many
BIAS_STEP = 0.125  # of the biases as they are sent: a key's share of attention to 6 %


class Sent(NamedTuple):
    """What a message says to one reader; zeros at padding."""

    numbers: Int[Array, "b t w"]  # in units of the step
    kept: Bool[Array, "l b t k"]
    bias: Int[Array, "l b t k"]  # in units of BIAS_STEP


def code_of(params: Tree) -> Code:
    """Returns the code of a reader's part of the trained tree."""
    return Code(params["mean"], params["scale"], params["basis"])


def abstract(cfg: DecoderConfig, width: int) -> Tree:
    """Returns a reader's part of the tree as shapes; `width` is at most as large as its keys and values of a token."""
    heads, each = (cfg.layers, cfg.kv_heads), 2 * cfg.layers * cfg.kv_heads * cfg.head_dim
    width = min(width, each)
    shapes = {
        "mean": (2, *heads, cfg.head_dim),
        "scale": (2, cfg.layers),
        "basis": (width, each),
        "variance": (width,),
        "tables": (RATIOS, *heads),
        "step": (),
        "fitted": (),  # 1: values and biases are fitted, 0: exact values and no biases
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def encode(
    cfg: DecoderConfig, params: Tree, reading: Reading, kept: Bool[Array, "l b t k"], *, seen: jax.Array, fitted: bool
) -> Sent:
    """Returns the message of a text that was read behind `seen` tokens.

    Where it is `fitted`, the code carries values fitted to the kept keys, and the biases fit what the reader decodes.
    """
    text, code = reading.text, code_of(params)
    v = text.v
    if fitted:
        assert reading.queries is not None, "a fit needs the repeating queries"
        v, _ = cache_choice.fit(cfg, reading.queries, text, kept, seen=seen)
        v = jnp.where(kept[..., None], v, text.v)
    numbers = _solve(code, params, text._replace(v=v), reading.power, kept, fitted=fitted)
    bias = jnp.zeros(kept.shape, jnp.int32)
    if fitted:
        assert reading.queries is not None, "a fit needs the repeating queries"
        sent = cache_code.read(code, numbers.astype(jnp.float32) * params["step"])
        _, found = cache_choice.fit(cfg, reading.queries, text, kept, seen=seen, sent=sent)
        bias = jnp.rint(found / BIAS_STEP).astype(jnp.int32)
    return Sent(numbers, kept, bias)


def decode(params: Tree, sent: Sent, mask: Bool[Array, "b t"], dtype: jax.typing.DTypeLike) -> KVPrefix:
    """Returns a message as the keys and values that its reader attends to."""
    k, v = cache_code.read(code_of(params), sent.numbers.astype(jnp.float32) * params["step"])
    prefix = KVPrefix(k.astype(dtype), v.astype(dtype), mask)
    return kv_prefix.choose(prefix, sent.kept, sent.bias.astype(jnp.float32) * BIAS_STEP)


def _solve(  # noqa: PLR0913
    code: Code,
    params: Tree,
    target: KVPrefix,
    power: Float[Array, "l b t k"],
    kept: Bool[Array, "l b t k"],
    *,
    fitted: bool,
) -> Int[Array, "b t w"]:
    """Returns the numbers of a text in units of the step."""
    z = cache_code.write(code, target)
    return jnp.where(target.mask[..., None], jnp.rint(z / params["step"]), 0).astype(jnp.int32)
