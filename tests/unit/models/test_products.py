"""Products of bf16 factors with fp32 sums, as a CPU computes them: their numbers, and that no model has others."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax import recipes
from lw_jax.core import precision
from lw_jax.models import attention, decoder, products
from lw_jax.training.step_spec import StepSpec
from sharding import placement
from tests import tiny

BF16 = precision.Precision("bfloat16", "float32")
EXACT = {"rtol": 1e-5, "atol": 1e-5}  # fp32 sums of the same rounded factors in another order
LOSS = 5e-3  # of a step in bf16 beside fp32, relative; a gradient's difference beside its norm: GRADIENT
GRADIENT = 5e-2


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize(
    ("equation", "shape", "rows"),
    [("btd,fd->btf", (7, 5), (1, 1)), ("btd,hed->bthe", (2, 3, 5), (2, 3))]
    + [("bmi,io->bmo", (5, 6), (1, 1)), ("bthe,dhe->btd", (4, 5, 2), (2, 3))],
)
def test_factors_and_result_are_rounded_and_sums_are_not(equation, shape, rows):
    x = draw(*rows, 5, 2) if equation.startswith("bthe") else draw(*rows, 5)
    weights = draw(*shape, seed=1).astype(jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: products.product(equation, x, w), x, weights)
    wanted, wanted_pull = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), rounded(x), rounded(weights))
    gradient = draw(*y.shape, seed=2)
    of_x, of_weights = pull(gradient)
    wanted_x, wanted_weights = wanted_pull(rounded(gradient))
    assert (y.dtype, of_x.dtype, of_weights.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(y, wanted, rtol=2**-8, atol=1e-5)
    np.testing.assert_array_equal(y, rounded(y))  # the backward pass finds the same number as bf16
    np.testing.assert_allclose(of_x, wanted_x, **EXACT)
    np.testing.assert_allclose(rounded(of_weights), wanted_weights, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("rows", "multiplied"), [(1, 2), (2, 2), (3, 3)])
def test_one_row_is_multiplied_as_two_once_compiled(rows, multiplied):
    weights = draw(7, 5).astype(jnp.bfloat16)
    run = jax.jit(lambda x, weights: products.product("btd,fd->btf", x, weights))
    text = run.lower(draw(rows, 1, 5), weights).compile().as_text()
    assert re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text) == [f"{multiplied},7"]
    assert run(draw(rows, 1, 5), weights).shape == (rows, 1, 7)


@pytest.mark.parametrize(("equation", "shape"), [("bhie,bhem->bhim", (5, 3)), ("bhij,bhje->bhie", (5, 4))])
def test_one_row_for_each_matrix_of_a_batch_is_multiplied_with_its_own(equation, shape):
    x, weights = draw(2, 3, 1, 5), draw(2, 3, *shape, seed=1).astype(jnp.bfloat16)
    found, pull = jax.vjp(lambda x, w: products.wide_product(equation, x, w), x, weights)
    wanted, wanted_pull = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), rounded(x), rounded(weights))
    np.testing.assert_allclose(found, wanted, **EXACT)
    gradient = rounded(draw(*wanted.shape, seed=2))
    np.testing.assert_allclose(pull(gradient)[0], wanted_pull(gradient)[0], **EXACT)


def test_the_backward_pass_finds_products_as_the_bits_of_bf16():
    weights = draw(7, 5).astype(jnp.bfloat16)
    layer = decoder.checkpoint_layer(lambda x: jnp.sin(products.product("btd,fd->btf", x, weights)), True)
    _, pull = jax.vjp(layer, draw(2, 3, 5))
    saved = {leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == (2, 3, 7)}
    assert saved == {"uint16"}


@pytest.mark.parametrize(("remat", "saved"), [("none", 7), ("full", 0)])
def test_products_that_a_scan_stacks_stand_behind_a_barrier(remat, saved):
    """Else XLA computes them twice on a card: tests/unit/planning/test_hlo_counts.py, by JAX 0.11."""
    params, x = tiny.draw_decoder(tiny.DECODER), draw(2, 5, tiny.DECODER.width)

    def loss(x):
        mode = decoder.Mode(remat=remat)
        return decoder.forward(params, tiny.DECODER, x, mask=jnp.ones(x.shape[:2], bool), mode=mode).hidden.sum()

    assert str(jax.make_jaxpr(jax.grad(loss))(x)).count("optimization_barrier") == saved
    assert "optimization_barrier" not in str(jax.make_jaxpr(loss)(x))


@pytest.mark.parametrize(("heads", "biased"), [(2, False), (6, True)])
def test_attention_of_narrow_products_equals_jax_own(heads, biased):
    q, k, v, mask = draw(2, 7, heads, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2), draw(2, 1, 7, 9) > -0.5
    mask = mask.at[:, :, :, 0].set(True)
    biases = [draw(2, 9, 2, seed=4)] if biased else []  # of the keys' scores

    @functools.partial(jax.jit, static_argnums=0)
    def both(factors, gradient):
        def attend(q, k, v, bias=None):
            return attention.attention(q, k, v, mask=mask, bias=bias, factors=factors)

        found, pull = jax.vjp(attend, q, k, v, *biases)
        return [found, *pull(gradient)]

    gradient = draw(*q.shape, seed=3)
    for narrow, wide in zip(both("bfloat16", gradient), both(None, gradient), strict=True):
        size = np.linalg.norm(wide)
        assert 1e-5 * size < np.linalg.norm(narrow - wide) < 2e-2 * size


@functools.cache
def outline(root, kind, dtype):
    if kind == "ttt":
        return tiny.make_ttt(root, compute__dtype=dtype)
    body = {"encoder__kind": "lm", "encoder__source": str(tiny.readers(root)["llama"])}
    return tiny.make_recipe(root, only="qwen", compute__dtype=dtype, **body)


def measure(recipe):
    """(loss, gradient) of one batch of the recipe."""
    built = recipe.build()
    batch = jax.tree.map(jnp.asarray, recipe.data_schedule().batch(0, global_batch=8, seed=0, share=slice(0, 8)))

    def loss(trainable):
        terms = recipe.loss(trainable, built.frozen, batch, jax.random.key(0))
        return terms.sum / terms.weight

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(built.trainable))


@pytest.mark.parametrize("kind", ["lm", "ttt"])
def test_a_step_in_bf16_is_near_the_step_in_fp32(root, kind):
    (loss, gradient), (wanted, exact) = (measure(outline(root, kind, dtype)) for dtype in ("bf16", "fp32"))
    assert 0 < abs(float(loss / wanted) - 1) < LOSS
    pairs = list(zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True))
    assert {one.dtype.name for one, _ in pairs} == {"float32"}
    apart = np.sqrt(sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs))
    assert apart < GRADIENT * np.sqrt(sum(float(jnp.sum(b**2)) for _, b in pairs))


@pytest.mark.parametrize("kind", ["lm", "ttt"])
def test_every_product_of_a_step_has_narrow_factors_and_wide_sums(root, kind):
    recipe = outline(root, kind, "bf16")
    program = StepSpec(recipe.cfg, recipe)
    text = "".join(part.lowered.as_text() for part in program.lower(recipe.batch_widths(), 1).values())
    dots = re.findall(r"dot_general .*: \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>", text)
    assert dots
    pooling = f"x{recipe.cfg.encoder.slots}x{recipe.cfg.encoder.window}xf32"  # means over windows, in the values' fp32
    wide = [dot for dot in dots if "f32" in dot[0] + dot[1] and pooling not in dot[0] + dot[1]]
    narrow = [dot for dot in dots if dot[0].endswith("bf16") and dot[1].endswith("bf16")]
    assert len(narrow) > 10 and all(result.endswith("xf32") for *_, result in narrow)
    assert not wide, wide


def test_frozen_stacks_are_bits_and_a_tied_head_is_stored_for_its_products(root):
    recipe = tiny.make_recipe(root, only="llama", compute__dtype="bf16")
    frozen = recipe.load_frozen()["llama"]
    exact = tiny.make_recipe(root, only="llama", compute__dtype="fp32").load_frozen()["llama"]
    assert (frozen["layers"]["q"].dtype, frozen["embed"].dtype) == (jnp.uint16, jnp.float32)
    np.testing.assert_array_equal(
        products.from_bits(frozen["layers"]["up"]), exact["layers"]["up"].astype(jnp.bfloat16)
    )
    head = exact.get("head", exact["embed"])
    np.testing.assert_array_equal(frozen["head"], head.astype(jnp.bfloat16))
    shapes = recipe.abstract.frozen["llama"]
    assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(lambda x: x.dtype, frozen)


@pytest.mark.parametrize(
    ("flags", "limit", "wanted"),
    [
        (("amx_bf16", "avx512_bf16"), "", "AMX"),
        (("avx512_bf16",), "", "AVX-512 BF16"),
        (("avx2",), "", ""),
        (("amx_bf16", "avx512_bf16"), "--xla_cpu_max_isa=AVX512", ""),
    ],
)
def test_auto_is_bf16_where_the_processor_has_products_for_it(monkeypatch, flags, limit, wanted):
    monkeypatch.setattr(precision, "_flags", lambda: flags)
    monkeypatch.setenv("XLA_FLAGS", limit)
    assert precision.bf16_instructions() == wanted
    assert precision.of("auto", "cpu") == (BF16 if wanted else precision.FP32)
    assert precision.of("auto", "gpu") == precision.of("bf16", "gpu") == ("bfloat16", "bfloat16")
    assert precision.of_reader("bf16", "fp32", "cpu") == BF16


def test_a_gpu_multiplies_readers_as_they_are_stored(root):
    recipe = tiny.make_recipe(root, only="llama", compute__dtype="bf16")
    absent = placement.Placement("single", recipe.placement.learner, recipe.placement.readers, stands_for="gpu")
    shapes = recipes.make(recipe.cfg, absent, outline=False).abstract.frozen["llama"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"float32"}
