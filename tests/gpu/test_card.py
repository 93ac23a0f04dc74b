"""What only a card can tell: that it agrees with the CPU. Run with JAX_PLATFORMS=cuda,cpu pytest -m gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import decoder, wire
from tests import tiny

FP32 = 1e-4  # logits of unit size, matmuls at "highest": no TF32, other order of sums
BF16 = 0.05  # root mean square, of the logits' size


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    recipe = tiny.make_recipe(tmp_path_factory.getbasetemp() / "readers")
    params = jax.device_get(recipe.load_frozen()["llama"])
    batch = recipe.data("validation", rows=("text",)).collate(range(5))["readers"]["llama"]
    return recipe.wire.readers["llama"].config, params, batch["text"]


def logits(device: jax.Device, config: decoder.DecoderConfig, params, text, dtype: str) -> np.ndarray:
    params, text = jax.device_put((jax.tree.map(lambda leaf: leaf.astype(dtype), params), text), device)
    prompt = wire.text_prompt(params, text)
    out = decoder.forward(params, config, prompt.embeddings, mask=jnp.asarray(prompt.mask))
    return np.asarray(decoder.logits(params, out.hidden))[text["mask"]]


@pytest.mark.gpu
def test_fp32_logits_of_the_card_equal_the_cpus(case):
    with jax.default_matmul_precision("highest"):
        card, host = (logits(jax.devices(kind)[0], *case, "float32") for kind in ("cuda", "cpu"))
    np.testing.assert_allclose(card, host, atol=FP32)


@pytest.mark.gpu
def test_bf16_logits_of_the_card_stay_close(case):
    card, host = logits(jax.devices("cuda")[0], *case, "bfloat16"), logits(jax.devices("cpu")[0], *case, "float32")
    assert np.sqrt(np.mean((card - host) ** 2)) < BF16 * host.std()
