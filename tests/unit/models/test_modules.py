"""nnx modules seen as pure functions over plain dicts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lw_jax.models.modules import Pure, RMSNorm


class Block(nnx.Module):
    def __init__(self, width: int, out: int, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(width)
        self.linear = nnx.Linear(width, out, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


PURE = Pure(lambda rngs: Block(5, 3, rngs=rngs))
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)), jnp.float32)


def test_init_gives_plain_dicts_that_the_key_decides():
    params = jax.jit(PURE.init)(jax.random.key(0))
    assert type(params) is dict and type(params["linear"]) is dict
    assert jax.tree.map(jnp.shape, params) == {"linear": {"bias": (3,), "kernel": (5, 3)}, "norm": {"scale": (5,)}}
    again, other = (jax.jit(PURE.init)(jax.random.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(params["linear"]["kernel"], again["linear"]["kernel"])
    assert not np.array_equal(params["linear"]["kernel"], other["linear"]["kernel"])


def test_bound_module_computes_with_the_given_parameters_and_lets_gradients_through():
    kernel = np.arange(15.0, dtype=np.float32).reshape(5, 3)
    params = {"linear": {"bias": jnp.ones(3), "kernel": jnp.asarray(kernel)}, "norm": {"scale": jnp.full((5,), 2.0)}}
    normed = 2 * np.asarray(X) / np.sqrt(np.mean(np.square(X), axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(PURE.bind(params)(X), normed @ kernel + 1, rtol=1e-5)  # fp32 sums of five
    gradient = jax.jit(jax.grad(lambda params: PURE.bind(params)(X)[0, 1]))(params)
    np.testing.assert_allclose(gradient["linear"]["kernel"][:, 1], normed[0], rtol=1e-5)
    assert not gradient["linear"]["kernel"][:, 0].any()


def test_norm_keeps_bf16_and_measures_in_fp32():
    norm = Pure(lambda rngs: RMSNorm(5))
    x = (1e3 * X).astype(jnp.bfloat16)
    out = norm.bind({"scale": jnp.ones(5, jnp.bfloat16)})(x)
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float32)
    exact /= np.sqrt(np.mean(np.square(exact), axis=1, keepdims=True))
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=2**-8)  # one rounding to bf16
