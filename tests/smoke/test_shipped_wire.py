"""wires/pair, the wire in the repository: whole, small, and of no machine's paths. Its answers need its readers."""

import numpy as np
import pytest

from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.training import wire_folder, wire_tensors
from sharding import place
from tests import tiny
from tests.commands import PROJECT

FOLDER = PROJECT / "wires" / "pair"
MOST = 32e6  # bytes


def test_arrays_are_those_of_its_configuration():
    cfg = wire_folder.read_config(FOLDER)
    recipe = CacheWire(cfg, tiny.place(cfg), outline=True)
    codes = wire_tensors.read(FOLDER, place.place_shapes(recipe.abstract.trainable, recipe.shardings.trainable))
    for name in cfg.llms:
        basis = np.asarray(codes["codes"][name]["basis"])
        np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=0.02)
        assert (np.diff(codes["codes"][name]["tables"].mean(axis=(1, 2))) < 0).all()
    assert (FOLDER / wire_folder.TENSORS).stat().st_size < MOST


@pytest.mark.parametrize("file", [wire_folder.CONFIG, wire_folder.CARD])
def test_no_path_of_a_machine_and_a_licence(file):
    text = (FOLDER / file).read_text("utf-8")
    assert not {word for word in text.replace('"', " ").replace("`", " ").split() if word.startswith(("/", "~", "C:"))}
    assert file == wire_folder.CONFIG or "not stated" not in text and "not known" not in text
