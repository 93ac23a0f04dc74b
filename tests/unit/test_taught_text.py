"""lw_jax/inference/taught_text.py: the same vector under every placement, with packed readers too."""

import numpy as np
import pytest

from lw_jax.inference import taught_text
from tests import tiny

SAME = 2e-3  # of values near 1, after a few steps of Adam


pytestmark = pytest.mark.usefixtures("cache")


def teach(root, **places):
    recipe = tiny.make_recipe(root, eval__taught_steps=4, only="llama", compute__dtype="fp32", **places)
    found = taught_text.teach(recipe, recipe.load_frozen(), batch=8)
    return np.asarray(found["llama"])


def test_vector_is_the_same_on_any_devices(tmp_path_factory, monkeypatch, tmp_path):
    root = tmp_path_factory.getbasetemp() / "readers"
    found = []
    for number, places in enumerate(({}, {"devices": 4}, {"devices": 2, "model": 2, "mesh__model": 2})):
        monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / str(number)))
        found.append(teach(root, **places))
    for one in found[1:]:
        np.testing.assert_allclose(one / found[0].std(), found[0] / found[0].std(), atol=SAME)


def test_packed_readers_teach_too(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "readers"
    found = teach(root, llms__llama__weights="int8")
    assert np.isfinite(found).all() and found.std() > 0
