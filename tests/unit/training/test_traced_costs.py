"""lw_jax/training/traced_costs.py against what XLA compiles, and by hand where fusion decides."""

import functools

import jax
import jax.numpy as jnp
import pytest

from lw_jax.models import decoder
from lw_jax.models.decoder import Mode
from lw_jax.planning import hlo_counts
from lw_jax.training.traced_costs import Loop, trace
from tests import tiny

ROWS, POSITIONS, ANSWERS = 4, 19, 5
A = jax.ShapeDtypeStruct((7, 11), jnp.float32)
B = jax.ShapeDtypeStruct((11, 13), jnp.float32)


def loss(x, params, remat: str):
    hidden = decoder.forward(params, tiny.DECODER, x, mask=jnp.ones(x.shape[:2], bool), mode=Mode(remat=remat)).hidden
    return jnp.sum(jax.nn.logsumexp(decoder.logits(params, hidden[:, -ANSWERS:]), axis=-1))


@pytest.mark.optimized  # whether something is computed twice is what the optimizations decide
@pytest.mark.parametrize(("remat", "argnums"), [("none", 0), ("full", (0, 1))])
def test_flops_and_loops_of_a_backward_pass_are_those_compiled(remat, argnums):
    params = decoder.abstract(tiny.DECODER, jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, POSITIONS, tiny.DECODER.width), jnp.float32)
    gradient = jax.grad(functools.partial(loss, remat=remat), argnums=argnums)
    # only machine code is left unoptimised, which nothing here reads
    program = jax.jit(gradient).lower(x, params).compile(compiler_options={"xla_backend_optimization_level": 0})
    found = trace(gradient, x, params)
    assert found.flops == hlo_counts.analyse(program.as_text()).flops
    assert {(loop.length, loop.reverse) for loop in found.loops} == {
        (tiny.DECODER.layers, False),
        (tiny.DECODER.layers, True),
    }


def test_elementwise_values_take_no_memory_unless_a_product_or_the_caller_takes_them():
    def fused(a, b):
        return jnp.tanh(jnp.exp(a) * 2.0 + a) @ b

    found, result = trace(fused, A, B), 4 * 7 * 13
    assert found.peak == 4 * 7 * 11 + result
    assert found.moved == 2 * 4 * 7 * 11, "what the product takes, written and read"
    summed = trace(lambda a, b: jnp.sum(jnp.exp(a @ b)), A, B)
    assert (summed.peak, summed.moved) == (result + 4, result + 2 * 4)


def test_a_loop_runs_so_often_and_copies_what_its_steps_cut_from_stacks():
    stack = jax.ShapeDtypeStruct((5, 11, 11), jnp.float32)

    def scanned(x, stack):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    found = trace(scanned, A, stack)
    assert found.flops == 5 * 2 * 7 * 11 * 11
    assert found.moved == 2 * 5 * 4 * 11 * 11
    assert found.loops == (Loop(5, reverse=False, bytes=4 * 7 * 11, times=1),)
    twice = trace(lambda x, stack: jax.lax.scan(lambda x, _: (scanned(x, stack), None), x, length=2)[0], A, stack)
    assert twice.flops == 2 * found.flops


def test_what_no_result_needs_costs_nothing_in_a_loop_either():
    def scanned(x, stack):
        def step(carried, w):
            kept, dropped = carried
            return (kept @ w, dropped @ w), None

        return jax.lax.scan(step, (x, x + 1), stack)[0][0]

    found = trace(scanned, A, jax.ShapeDtypeStruct((5, 11, 11), jnp.float32))
    assert found.flops == 5 * 2 * 7 * 11 * 11
