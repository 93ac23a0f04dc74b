"""The adapter begins at the size of the reader's embeddings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.types import TASKS
from lw_jax.models import adapter
from lw_jax.models.modules import Pure
from tests import tiny

WIDTH, HIDDEN, OUT, SLOTS = 24, 37, 58, 5
TARGET = 0.0137  # far from 1, as Llama's embeddings are
CALIBRATED = 0.05  # relative: 8 x 5 latents measure the size, others are sent


def make():
    one = Pure(adapter.Adapter, WIDTH, HIDDEN, OUT)
    drawn = jax.jit(one.init)(jax.random.key(0))
    target = jnp.asarray(TARGET)
    return one, adapter.calibrate(one, drawn, key=jax.random.key(1), slots=SLOTS, target=target)


def read(one, params, latents, task="answer"):
    """The prefix without the task's vector behind it."""
    return one.bind(params)(latents, task)[:, :-1]


def size(x, axis=None):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=axis))


@pytest.fixture(scope="module")
def latents():
    drawn = jax.random.normal(jax.random.key(7), (11, SLOTS, WIDTH))
    return drawn / adapter.rms(drawn, axis=-1)


def test_output_starts_at_the_reader_s_embedding_size(latents):
    one, params = make()
    prefix = read(one, params, latents)
    assert prefix.shape == (11, SLOTS, OUT)
    assert size(prefix) == pytest.approx(TARGET, rel=CALIBRATED)


def test_linear_path_stands_beside_the_layers(latents):
    one, params = make()
    quiet = params | {"down": jax.tree.map(jnp.zeros_like, params["down"])}
    kernel = np.asarray(params["skip"]["kernel"])
    expected = np.einsum("bmz,zd->bmd", np.asarray(latents), kernel) * np.asarray(params["gain"])
    np.testing.assert_allclose(read(one, quiet, latents), expected, atol=1e-6)  # values near 0.01
    assert size(np.asarray(read(one, params, latents)) - expected) > 0.1 * TARGET


def test_each_task_has_a_vector_of_its_own_behind_the_same_prefix(latents):
    one, params = make()
    assert params["tasks"].shape == (len(TASKS), OUT)
    whole = {task: np.asarray(one.bind(params)(latents, task)) for task in TASKS}
    for number, task in enumerate(TASKS):
        assert whole[task].shape == (11, SLOTS + 1, OUT)
        np.testing.assert_array_equal(whole[task][:, :-1], whole["answer"][:, :-1])
        vector = np.asarray(params["tasks"][number] * params["gain"])
        np.testing.assert_allclose(whole[task][:, -1], np.tile(vector, (11, 1)), rtol=1e-6)
        # As large as the rest, whatever the gain: a reader that is used to its embeddings' size can read it.
        assert size(whole[task][:, -1]) == pytest.approx(TARGET, rel=0.3)  # 58 drawn values


KV = dataclasses.replace(tiny.DECODER, layers=3, kv_heads=2, head_dim=7, width=OUT)


def test_latents_become_keys_and_values_of_every_layer_each_with_a_gain_of_its_own(latents):
    one = Pure(adapter.KVAdapter, WIDTH, HIDDEN, KV)
    gain = jnp.asarray([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
    params = jax.jit(one.init)(jax.random.key(0)) | {"gain": gain, "task_gain": jnp.float32(3.0)}
    hidden = one.bind(params)
    found = hidden(latents, TASKS[1])
    mixed = latents + hidden.down(jax.nn.gelu(hidden.up(hidden.norm(latents))))
    flat = np.asarray(mixed) @ np.asarray(params["read"]["kernel"])
    expected = flat.reshape(11, SLOTS, 3, 2, 2, 7) * np.asarray(gain)[:, :, None, None]
    np.testing.assert_allclose(found.k, expected[:, :, :, 0].transpose(2, 0, 1, 3, 4), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.v, expected[:, :, :, 1].transpose(2, 0, 1, 3, 4), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.task[:, 0], np.tile(3 * params["tasks"][1], (11, 1)), rtol=1e-5)
