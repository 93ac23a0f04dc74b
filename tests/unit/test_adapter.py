"""The adapter begins, and if asked stays, at the size of the reader's embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import adapter

WIDTH, HIDDEN, OUT, SLOTS = 24, 37, 58, 5
TARGET = 0.0137  # far from 1, as Llama's embeddings are
CALIBRATED = 0.05  # relative: 8 x 5 latents measure the size, others are sent


def make(calibration):
    one = adapter.make(WIDTH, HIDDEN, OUT, calibration=calibration)
    drawn = jax.jit(one.init)(jax.random.key(0))
    target = jnp.asarray(TARGET)
    return one, adapter.calibrate(one, drawn, key=jax.random.key(1), slots=SLOTS, target=target)


def size(x, axis=None):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=axis))


@pytest.fixture(scope="module")
def latents():
    drawn = jax.random.normal(jax.random.key(7), (11, SLOTS, WIDTH))
    return drawn / adapter.rms(drawn, axis=-1)


@pytest.mark.parametrize("calibration", ["init", "always"])
def test_output_starts_at_the_reader_s_embedding_size(calibration, latents):
    one, params = make(calibration)
    prefix = one.bind(params)(latents)
    assert prefix.shape == (11, SLOTS, OUT)
    assert size(prefix) == pytest.approx(TARGET, rel=CALIBRATED)


def test_always_holds_each_example_at_the_gain_whatever_the_matrices_do(latents):
    for calibration, held in (("always", True), ("init", False)):
        one, params = make(calibration)
        moved = params | {"down": jax.tree.map(lambda leaf: 3 * leaf + 0.1, params["down"])}
        sizes = size(one.bind(moved)(latents), axis=(1, 2))
        assert (np.abs(sizes / TARGET - 1) < CALIBRATED).all() == held


@pytest.mark.parametrize("calibration", ["init", "always"])
def test_gain_is_trained_and_scales_the_prefix(calibration, latents):
    one, params = make(calibration)
    assert params["gain"].shape == () and params["gain"].dtype == jnp.float32
    before = one.bind(params)(latents)
    after = one.bind(params | {"gain": 3 * params["gain"]})(latents)
    np.testing.assert_allclose(after, 3 * before, rtol=1e-5)
    gradient = jax.grad(lambda params: jnp.sum(jnp.square(one.bind(params)(latents))))(params)
    assert gradient["gain"] > 0


def test_linear_path_stands_beside_the_layers(latents):
    one, params = make("init")
    quiet = params | {"down": jax.tree.map(jnp.zeros_like, params["down"])}
    kernel = np.asarray(params["skip"]["kernel"])
    expected = np.einsum("bmz,zd->bmd", np.asarray(latents), kernel) * np.asarray(params["gain"])
    np.testing.assert_allclose(one.bind(quiet)(latents), expected, atol=1e-6)  # values near 0.01
    assert size(np.asarray(one.bind(params)(latents)) - expected) > 0.1 * TARGET


def test_zero_latents_stay_finite():
    for calibration in ("init", "always"):
        one, params = make(calibration)
        assert jnp.isfinite(one.bind(params)(jnp.zeros((1, SLOTS, WIDTH)))).all()


def test_rms_is_measured_in_fp32():
    x = jnp.full((3, 4), 300.0, jnp.float16)  # its square overflows fp16
    assert float(adapter.rms(x, axis=None).reshape(())) == 300.0
    assert adapter.rms(x, axis=(1,)).shape == (3, 1)
