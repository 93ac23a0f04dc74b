"""Projections of a decoder layer by name: plain or packed matrices, with a bias or a LoRA pair where there is one."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lw_jax.core.types import Tree
from lw_jax.models import quant
from lw_jax.models.products import PRODUCT, product

# name -> a matrix' product, and the same product through a LoRA pair a [r in], b [out r]
_PRODUCTS = {
    "q": ("btd,hed->bthe", "btd,rd->btr", "btr,her->bthe"),
    "o": ("bthe,dhe->btd", "bthe,rhe->btr", "btr,dr->btd"),
    "gate": ("btd,fd->btf", "btd,rd->btr", "btr,fr->btf"),
    "down": ("btf,df->btd", "btf,rf->btr", "btr,dr->btd"),
}
_PRODUCTS |= {"k": _PRODUCTS["q"], "v": _PRODUCTS["q"], "up": _PRODUCTS["gate"]}


def apply(x: jax.Array, weights: Tree, name: str, factors: str | None, *, saved: bool = False) -> jax.Array:
    """Applies a matrix, packed or not, then its `{name}_bias` and `{name}_lora`; `saved`: see `products.product`."""
    equations, matrix = _PRODUCTS[name], weights[name]
    narrow = factors or x.dtype
    if not isinstance(matrix, dict):
        y = product(equations[0], x, matrix.astype(narrow), saved=saved)
    elif quant.multiplies(matrix):
        y = checkpoint_name(quant.multiply(x.reshape(*x.shape[:2], -1), matrix), PRODUCT)
    else:
        restored = output_matrix(weights, x.shape[2:], narrow) if name == "o" else quant.restore(matrix, narrow)
        y = product(equations[0], x, restored, saved=saved)
    bias, lora = weights.get(f"{name}_bias"), weights.get(f"{name}_lora")
    if bias is not None:
        y = y + bias[None, None, :, :]
    if lora is not None:
        inner = product(equations[1], _drop(x, lora), lora["a"].astype(narrow))
        y = y + product(equations[2], inner, lora["b"].astype(narrow))
    return y


def output_matrix(weights: Tree, heads: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Float[Array, "d h e"]:
    """Returns the matrix behind attention, packed or not, of `heads`: their number and size."""
    matrix = weights["o"]
    if not isinstance(matrix, dict):
        return matrix.astype(dtype)
    restored = quant.restore(matrix, dtype)
    return restored.reshape(*restored.shape[:-1], *heads)


def _drop(x: jax.Array, lora: Tree) -> jax.Array:
    """Applies dropout to a LoRA pair's inputs where the pair has keys, one for each row of x."""
    if "keys" not in lora:
        return x
    keep = 1.0 - lora["dropout"]
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, keep, x.shape[1:]))
    mask = draw(jax.random.wrap_key_data(lora["keys"]))
    # In fp32, as torch does: bf16 would round the rate.
    return jnp.where(mask, (x.astype(jnp.float32) / keep).astype(x.dtype), jnp.zeros((), x.dtype))
