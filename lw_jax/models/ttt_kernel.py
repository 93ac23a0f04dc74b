"""The inner linear model of a TTT layer as one kernel a text and head, for GPUs: fast weights never leave the chip.

The scan of `ttt_inner.py` writes weights, gradients and what its backward pass needs to memory at each chunk. Here a
program goes through a text's chunks with the weights in registers; for the backward pass the weights before each chunk
are saved, all else is computed again. Pallas on Triton. Notation as in `ttt_inner.py`; n: chunks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from lw_jax.models.products import multiply, wide_product
from lw_jax.models.ttt_inner import Inner, Local, Text, normalise, pull_back

WARPS = 4  # the backward pass takes all registers that a thread may have

Weights = tuple[jax.Array, jax.Array]  # w [e e], b [e], fp32
Product = Callable[[str, jax.Array, jax.Array], jax.Array]


class Operands(NamedTuple):
    """All that a text's outputs depend on; rows of all lie on the same devices."""

    q: Float[Array, "b t h e"]
    k: Float[Array, "b t h e"]
    v: Float[Array, "b t h e"]
    rate: Float[Array, "b t h"]
    w: Float[Array, "b h e e"]
    b: Float[Array, "b h e"]
    token: Float[Array, "b h i"]
    scale: Float[Array, "b h e"]
    offset: Float[Array, "b h e"]


def read_by_kernel(inner: Inner, text: Text, weights: dict[str, jax.Array], local: Local) -> Float[Array, "b t h e"]:
    """Returns the outputs of `ttt_inner.read_by_chunk`, of whole chunks; on a CPU by Pallas' interpreter, slowly."""
    rows, _, heads, _ = text.q.shape
    token = jnp.broadcast_to(inner.token, (rows, heads, inner.token.shape[0]))
    scale, offset = (jnp.broadcast_to(x[:, :, 0], (rows, *x[0, :, 0].shape)) for x in (inner.scale, inner.offset))
    operands = Operands(*text, weights["w1"], weights["b1"], token, scale, offset)
    return _read(inner.precision.factors, local, operands)


def _read_chunk(  # noqa: PLR0913  (what a chunk depends on, each with a gradient)
    product: Product,
    q: Float[Array, "i e"],
    k: Float[Array, "i e"],
    v: Float[Array, "i e"],
    rate: Float[Array, " i"],
    w: Float[Array, "e e"],
    b: Float[Array, " e"],
    token: Float[Array, " i"],
    last: Float[Array, ""],
    scale: Float[Array, " e"],
    offset: Float[Array, " e"],
) -> tuple[Float[Array, "i e"], Weights]:
    """Returns a chunk's outputs and the weights after it; `last` is the last token's factor, of the update."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (q.shape[0], q.shape[0]), axis) for axis in (0, 1))
    eta = jnp.where(row >= column, token[:, None] * rate[None], 0.0)
    mixed = (product("ie,je->ij", q, k) + 1.0) * eta
    target = v.astype(jnp.float32) - k.astype(jnp.float32)
    gradient = pull_back(product("ie,em->im", k, w) + b[None], target, scale[None], offset[None])
    z = product("ie,em->im", q, w) + b[None] - product("ij,je->ie", mixed, gradient)
    weighted = (last * rate)[:, None] * gradient
    out = q.astype(jnp.float32) + normalise(z, scale[None], offset[None])
    return out, (w - product("ie,im->em", k, weighted), b - jnp.sum(weighted, axis=0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _read(factors: str, local: Local, operands: Operands) -> jax.Array:
    return _call(_launch_forward, factors, local, operands)[0]


def _forward(factors: str, local: Local, operands: Operands) -> tuple[jax.Array, Operands]:
    out, w, b = _call(functools.partial(_launch_forward, saved=True), factors, local, operands)
    return out, operands._replace(w=w, b=b)


def _backward(factors: str, local: Local, saved: Operands, gradient: jax.Array) -> tuple[Operands]:
    *leaves, of_last = _call(_launch_backward, factors, local, saved, gradient)
    gradients = Operands(*leaves)
    return (gradients._replace(token=gradients.token.at[:, :, -1].add(of_last)),)


_read.defvjp(_forward, _backward)


def _call(launch: Callable[..., Any], factors: str, local: Local, *operands: Any) -> tuple[jax.Array, ...]:
    """Launches a kernel on each device's own rows."""
    run = functools.partial(launch, factors)
    ways = {"cpu": functools.partial(run, interpret=True), "cuda": functools.partial(run, interpret=False)}
    return local(functools.partial(jax.lax.platform_dependent, **ways))(*operands)


def _launch_forward(factors: str, operands: Operands, *, interpret: bool, saved: bool = False) -> tuple[jax.Array, ...]:
    """Returns the outputs [b t h e] and, if saved, each chunk's weights [b h n e e] and [b h n e]."""
    chunk = operands.token.shape[2]
    count = operands.q.shape[1] // chunk
    shapes = [jax.ShapeDtypeStruct(operands.q.shape, jnp.float32)]
    if saved:
        shapes += [jax.ShapeDtypeStruct((*x.shape[:2], count, *x.shape[2:]), jnp.float32) for x in operands[4:6]]

    def kernel(*refs: Any) -> None:
        inputs, (out, *before) = Operands(*refs[:9]), refs[9:]
        model = (inputs.token[...], inputs.token[chunk - 1], inputs.scale[...], inputs.offset[...])
        read: Any = functools.partial(_read_chunk, functools.partial(multiply, factors=factors))

        def body(number: jax.Array, weights: Weights) -> Weights:
            for ref, value in zip(before, weights, strict=False):
                ref[number] = value
            tokens = pl.ds(number * chunk, chunk)
            out[tokens], after = read(*(ref[tokens] for ref in inputs[:4]), *weights, *model)
            return after

        jax.lax.fori_loop(0, count, body, (inputs.w[...], inputs.b[...]))

    specs = [_of_text(shapes[0]), *map(_of_head, shapes[1:])]
    call = _pallas(kernel, "ttt_forward", operands, shapes, specs, factors=factors, interpret=interpret)
    return call(*operands)


def _launch_backward(
    factors: str, operands: Operands, gradient: jax.Array, *, interpret: bool
) -> tuple[jax.Array, ...]:
    """Returns the gradients of `Operands` and of each text's and head's last token factor [b h].

    Of the operands `w` and `b` are those of each chunk, as the pass forward saved them.
    """
    rows, length, heads, size = operands.q.shape
    chunk = operands.token.shape[2]
    count = length // chunk
    sum_shapes = ((size, size), (size,), (chunk,), (size,), (size,), ())  # gradients that add up over the chunks
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:4]]
    shapes += [jax.ShapeDtypeStruct((rows, heads, *shape), jnp.float32) for shape in sum_shapes]

    def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return wide_product(equation, left.astype(factors), right.astype(factors))

    def kernel(*refs: Any) -> None:
        inputs, of_out, of_text, sums = Operands(*refs[:9]), refs[9], refs[10:14], refs[14:]
        model = (inputs.token[...], inputs.token[chunk - 1], inputs.scale[...], inputs.offset[...])
        read = functools.partial(_read_chunk, product)

        def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number = count - 1 - step
            tokens = pl.ds(number * chunk, chunk)
            text = (ref[tokens] for ref in inputs[:4])
            _, pull = jax.vjp(read, *text, inputs.w[number], inputs.b[number], *model)
            *of_chunk, of_w, of_b, of_token, of_last, of_scale, of_offset = pull((of_out[tokens], carry[:2]))
            for ref, value in zip(of_text, of_chunk, strict=True):
                ref[tokens] = value
            added = (of_token, of_scale, of_offset, of_last)
            return of_w, of_b, *(x + y for x, y in zip(carry[2:], added, strict=True))

        ends = jax.lax.fori_loop(0, count, body, tuple(jnp.zeros(shape, jnp.float32) for shape in sum_shapes))
        for ref, value in zip(sums, ends, strict=True):
            ref[...] = value

    specs = [*map(_of_text, shapes[:4]), *map(_of_head, shapes[4:])]
    call = _pallas(kernel, "ttt_backward", operands, shapes, specs, factors=factors, interpret=interpret)
    return call(*operands, gradient)


def _pallas(  # noqa: PLR0913
    kernel: Callable[..., None], name: str, operands: Operands, outs: Any, specs: Any, *, factors: str, interpret: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the call of a kernel, a program for each text and head; backward takes the outputs' gradient too."""
    rows, length, heads, size = operands.q.shape
    backward = name == "ttt_backward"
    flops = rows * heads * length * size * (4 * operands.token.shape[2] + 6 * size)
    in_specs = [*map(_of_text, operands[:4]), *map(_of_head, operands[4:])]
    return pl.pallas_call(
        kernel,
        grid=(rows, heads),
        in_specs=[*in_specs, in_specs[0]] if backward else in_specs,
        out_specs=specs,
        out_shape=outs,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name=name,
        metadata={  # for `planning.hlo_counts`
            "arithmetic": {"bfloat16": "bf16"}.get(factors, "fp32"),
            "flops": str(3 * flops if backward else flops),
        },
    )


def _of_text(x: Any) -> pl.BlockSpec:
    """Returns the block of one text and head of [b t h ...]."""
    block = (None, x.shape[1], None, *x.shape[3:])
    return pl.BlockSpec(block, lambda row, head: (row, 0, head, *[0] * (len(block) - 3)))


def _of_head(x: Any) -> pl.BlockSpec:
    """Returns the block of one text and head of [b h ...]."""
    block = (None, None, *x.shape[2:])
    return pl.BlockSpec(block, lambda row, head: (row, head, *[0] * (len(block) - 2)))
