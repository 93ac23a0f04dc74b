"""Frozen matrices in 4 or 8 bits, packed so that a scan over layers restores one layer at a time.

A packed matrix is a plain dict in the place of its array, [out, in] as before:

    nf4    codes u8[.. in/2], scale bf16[.. in/64]: 16 levels of the unit normal (QLoRA, Dettmers et al. 2023, appendix
           E), blocks of 64 along `in`, each divided by its largest absolute value
    awq    codes u8[.. in/2], zero u8[.. in/128], scale f16[.. in/128]: (code - zero) x scale, as in the file
    int8   codes i8[.. in], scale f32[.. 1]: a row of `in` divided by its largest absolute value
    w8a8   codes i8[.. in], row f32[.. 1]: the same numbers, for int8 matmuls (`multiply`): a token's inputs, and
           backward the gradients of its outputs, are rounded to 8 bits likewise
           (SwitchBack, Wortsman et al. 2023, with frozen weights)
    fp8    codes u8[.. in], row f32[.. 1]: the bits of f8e4m3, a row divided so that its largest value is 448; likewise
           in fp8 matmuls. As floats XLA's CPU backend would convert the whole stack for every layer of a scan

The lower four bits of a byte are the even position. JAX's own int4 is not used: a scan unpacks the whole stack of it
first, and on the CPU as bytes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree

PACKED = ("nf4", "awq", "int8", "w8a8", "fp8")  # the first three are dequantised before the matmul
# Kinds with one scale a row of `in` -> its name, and the dtype of the codes
_ROWS = {"int8": ("scale", jnp.int8), "w8a8": ("row", jnp.int8), "fp8": ("row", jnp.uint8)}
_FP8 = jnp.float8_e4m3fn
BLOCK = {"nf4": 64, "awq": 128}
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of every layer; embedding, head, norms, biases stay as they are
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def describe(shape: tuple[int, ...], kind: str) -> Tree:
    """Returns a packed matrix [.. in] as shapes."""
    *out, size = shape
    if kind in _ROWS:
        scale, dtype = _ROWS[kind]
        return {"codes": jax.ShapeDtypeStruct(shape, dtype), scale: jax.ShapeDtypeStruct((*out, 1), jnp.float32)}
    blocks = (*out, size // BLOCK[kind])
    packed = {"codes": jax.ShapeDtypeStruct((*out, size // 2), jnp.uint8)}
    if kind == "nf4":
        return packed | {"scale": jax.ShapeDtypeStruct(blocks, jnp.bfloat16)}
    return packed | {
        "scale": jax.ShapeDtypeStruct(blocks, jnp.float16),
        "zero": jax.ShapeDtypeStruct(blocks, jnp.uint8),
    }


def abstract(tree: Tree, kind: str) -> Tree:
    """Returns a decoder's tree of shapes with its layers' matrices packed; unchanged for a kind that is not packed.

    Raises UserError where a matrix' rows are not whole blocks.
    """
    if kind not in PACKED:
        return tree
    layers = dict(tree["layers"])
    for name in MATRICES:
        shape = inputs_last(name, layers[name].shape)
        if shape[-1] % BLOCK.get(kind, 1):
            reason = f"weights={kind!r}: {name} has {shape[-1]} inputs, which are no whole blocks of {BLOCK[kind]}"
            raise UserError(f"{reason}; use 'int8', or do not pack this model")
        layers[name] = describe(shape, kind)
    return tree | {"layers": layers}


def inputs_last(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a matrix' shape with its inputs as one last axis: those of `o` are heads x values."""
    return (*shape[:-2], shape[-2] * shape[-1]) if name == "o" else shape


@functools.partial(jax.jit, static_argnames="kind")
def pack(matrix: jax.Array, kind: str) -> Tree:
    """Returns a matrix [.. in] packed as a kind of `PACKED` but "awq", which is only ever read from a file."""
    wide = matrix.astype(jnp.float32)
    if kind in _ROWS:
        name, dtype = _ROWS[kind]
        codes, scale = _round_rows(wide, jnp.int8 if dtype == jnp.int8 else _FP8)
        return {"codes": jax.lax.bitcast_convert_type(codes, dtype), name: scale}
    blocks = wide.reshape(*matrix.shape[:-1], -1, BLOCK[kind])
    scale = jnp.max(jnp.abs(blocks), axis=-1).astype(jnp.bfloat16)
    unit = blocks / jnp.where(scale > 0, scale, 1).astype(jnp.float32)[..., None]
    # The nearest level is found by counting the midpoints below: fifteen comparisons, an eighth of an argmin's time.
    codes = jnp.zeros(unit.shape, jnp.uint8)
    levels = np.array(LEVELS, np.float32)
    for midpoint in (levels[1:] + levels[:-1]) / np.float32(2):
        codes = codes + (unit > midpoint).astype(jnp.uint8)
    return {"codes": pack_nibbles(codes.reshape(matrix.shape)), "scale": scale}


def _round_rows(wide: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns fp32 values in 8 bits, int8 or fp8 [.. in], and the scale f32[.. 1] of each row."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = jnp.iinfo(dtype).max if whole else float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / jnp.float32(most)
    unit = wide / jnp.where(scale > 0, scale, 1.0)
    return (jnp.round(unit) if whole else unit).astype(dtype), scale


def restore(packed: Tree, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Dequantises a packed matrix to [.. in] in `dtype`; nf4 and int8 equal qwix's to the bit."""
    codes = _values(packed)
    if codes.dtype != jnp.uint8:
        return codes.astype(dtype) * packed["row" if multiplies(packed) else "scale"].astype(dtype)
    scale = packed["scale"]
    # A shift of each byte's two copies is one kernel with what follows; two stacked arrays would be written first.
    shifts = jnp.array([0, 4], codes.dtype).reshape(*[1] * codes.ndim, 2)
    nibbles = (codes[..., None] >> shifts & 15).reshape(*scale.shape, -1)
    if "zero" in packed:  # the scales are fp16: their product is rounded once
        steps = nibbles.astype(jnp.float32) - packed["zero"].astype(jnp.float32)[..., None]
        values = (steps * scale.astype(jnp.float32)[..., None]).astype(dtype)
    else:
        levels = jnp.take(jnp.array(LEVELS, dtype), nibbles.astype(jnp.int32), axis=0)
        values = levels * scale.astype(dtype)[..., None]
    return values.reshape(*codes.shape[:-1], -1)


def _values(packed: Tree) -> jax.Array:
    """Returns a matrix' codes, those of fp8 as floats."""
    codes = packed["codes"]
    return jax.lax.bitcast_convert_type(codes, _FP8) if multiplies(packed) and codes.dtype == jnp.uint8 else codes


def multiplies(packed: Tree) -> bool:
    """Returns True for a packed matrix of 8-bit matmuls ("w8a8", "fp8"), which is not restored."""
    return "row" in packed


@jax.custom_vjp
def multiply(x: Float[Array, "b t i"], packed: Tree) -> Float[Array, "b t *o"]:
    """Returns x times a "w8a8" or "fp8" matrix [.. in], accumulated in int32 or fp32.

    Only x has a gradient, as the matrix is frozen.
    """
    codes, row = _flat(packed)
    rounded, scale = _round_rows(x.astype(jnp.float32), codes.dtype)
    y = _product("bti,oi->bto", rounded, codes, x.dtype) * scale * row
    return y.astype(x.dtype).reshape(*x.shape[:2], *packed["codes"].shape[:-1])


def _multiply_forward(x: jax.Array, packed: Tree) -> tuple[jax.Array, Tree]:
    # The argument itself is saved: a scan over layers would stack any other value again.
    return multiply(x, packed), packed


def _multiply_backward(packed: Tree, gradient: Float[Array, "b t *o"]) -> tuple[jax.Array, None]:
    codes, row = _flat(packed)
    # The scales belong to the rows that are summed over here: they multiply the gradient before it is rounded.
    wide = gradient.reshape(*gradient.shape[:2], -1).astype(jnp.float32) * row
    rounded, scale = _round_rows(wide, codes.dtype)
    return (_product("bto,oi->bti", rounded, codes, gradient.dtype) * scale).astype(gradient.dtype), None


multiply.defvjp(_multiply_forward, _multiply_backward)


def _flat(packed: Tree) -> tuple[Shaped[Array, "o i"], Float[Array, "1 1 o"]]:
    codes = _values(packed)
    return codes.reshape(-1, codes.shape[-1]), packed["row"].reshape(1, 1, -1)


def _product(product: str, x: jax.Array, codes: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns a product of 8-bit factors in fp32; that of fp8 has passed through `dtype`, as a float product would."""
    out = jnp.int32 if codes.dtype == jnp.int8 else dtype
    return jnp.einsum(product, x, codes, preferred_element_type=out).astype(jnp.float32)


# Nibble of an int32 that holds column j of eight, in AutoAWQ's "gemm" layout.
_AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Returns the nibbles u8[rows, 8 n] of an AWQ tensor's int32[rows, n], in the order of their columns."""
    halves = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)  # byte i has nibbles 2i and 2i + 1
    out = np.empty((*words.shape, 8), np.uint8)
    for column, nibble in enumerate(_AWQ_NIBBLE):
        out[..., column] = (halves[..., nibble // 2] >> (4 * (nibble % 2))) & 15
    return out.reshape(words.shape[0], -1)


def pack_nibbles(values: Any) -> Any:
    """Returns nibbles u8[.. n], of JAX or of NumPy, as u8[.. n/2]."""
    return values[..., 0::2] | (values[..., 1::2] << 4)
