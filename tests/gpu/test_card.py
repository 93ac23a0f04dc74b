"""What only a card can tell: that it agrees with the CPU. Run with JAX_PLATFORMS=cuda,cpu pytest -m gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.precision import FP32 as EXACT
from lw_jax.models import decoder, quant, ttt_inner, ttt_kernel
from tests import tiny, ttt_cases

KERNEL = 1e-4  # of each output's and gradient's size: fp32 products without TF32
FP32 = 1e-4  # logits of unit size, matmuls at "highest": no TF32, other order of sums
EIGHT_BITS = 0.01  # root mean square, of the products' size: few of equal rows are rounded the other way
BF16 = 0.05  # root mean square, of the logits' size
LENGTH = 23


@pytest.fixture(scope="module")
def case():
    """(weights, tokens, mask), made on the CPU: a card compiles each operation that draws them."""
    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.device_get(tiny.draw_decoder(tiny.DECODER))
    ids = np.random.default_rng(0).integers(0, tiny.DECODER.vocab, (5, LENGTH), np.int32)
    return params, ids, np.arange(LENGTH) >= np.array([0, 3, 7, 2, 17])[:, None]


def logits(device: jax.Device, params, ids, mask, dtype: str) -> np.ndarray:
    @jax.jit
    def run(params, ids, mask):
        out = decoder.forward(params, tiny.DECODER, decoder.embed(params, ids), mask=mask)
        return decoder.logits(params, out.hidden)

    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)
    return np.asarray(run(*jax.device_put((params, ids, mask), device)), np.float32)[mask]


@pytest.mark.gpu
def test_fp32_logits_of_the_card_equal_the_cpus(case):
    with jax.default_matmul_precision("highest"):
        card, host = (logits(jax.devices(kind)[0], *case, "float32") for kind in ("cuda", "cpu"))
    np.testing.assert_allclose(card, host, atol=FP32 * host.std())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["w8a8", "fp8"])
def test_products_in_8_bits_of_the_card_equal_the_cpus(kind):
    x, matrix = (
        np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((2, 64, 96), (32, 96))
    )

    def run(device):
        own = jax.device_put((x, jax.device_get(quant.pack(matrix, kind))), device)
        y, back = jax.vjp(lambda x: quant.multiply(x, own[1]), own[0])
        return jax.device_get((y, back(y)[0]))

    for card, host in zip(*(run(jax.devices(name)[0]) for name in ("cuda", "cpu")), strict=True):
        assert np.sqrt(np.mean((card - host) ** 2)) < EIGHT_BITS * host.std()


@pytest.mark.gpu
def test_bf16_logits_of_the_card_stay_close(case):
    card, host = logits(jax.devices("cuda")[0], *case, "bfloat16"), logits(jax.devices("cpu")[0], *case, "float32")
    assert np.sqrt(np.mean((card - host) ** 2)) < BF16 * host.std()


@pytest.mark.gpu
def test_the_kernel_of_a_ttt_layer_gives_the_outputs_and_gradients_of_the_cpus_scan():
    with jax.default_device(jax.devices("cpu")[0]):
        p, weights, text, towards = jax.device_get(ttt_cases.draw_inner(5))

    def scan(inner, text, weights):
        return ttt_inner.read_by_chunk(inner, text, weights, lengths=None, unroll=1, measured=False)[0]

    def kernel(inner, text, weights):
        return ttt_kernel.read_by_kernel(inner, text, weights, lambda function: function)

    def run(kind, read):
        @jax.jit
        def loss(p, weights, text):
            return jnp.vdot(read(ttt_inner.Inner(p, EXACT), text, weights), towards)

        operands = jax.device_put((p, weights, text), jax.devices(kind)[0])
        return jax.device_get(jax.value_and_grad(loss, argnums=(0, 1, 2))(*operands))

    with jax.default_matmul_precision("highest"):
        card, host = run("cuda", kernel), run("cpu", scan)
    for one, other in zip(jax.tree.leaves(card), jax.tree.leaves(host), strict=True):
        assert np.linalg.norm(one - other) < KERNEL * np.linalg.norm(other)
