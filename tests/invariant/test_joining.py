"""A reader joins a wire that never saw it: the encoder stays to the bit, and old messages are read."""

import dataclasses

import jax
import numpy as np
import pytest

import lw_jax
from lw_jax.core.errors import UserError
from lw_jax.core.types import SHARED
from lw_jax.recipes.latentwire import LatentWire
from tests import tiny

pytestmark = pytest.mark.slow

TEXT = "Mira keeps a copper lantern in the old mill."


def make(root, reader, **changes):
    """A configuration of one of the tiny readers."""
    cfg = tiny.make_config(
        root, **{"mesh__placement": "single", "train__steps": 3, "train__checkpoint_every": 3} | changes
    )
    return dataclasses.replace(cfg, llms={reader: cfg.llms[reader]})


@pytest.fixture(scope="module", params=["bytes", "pairs beside a frozen body"])
def keys(request, root):
    """Those of the encoder, the same in both runs."""
    if request.param == "bytes":
        return {}
    source = str(tiny.readers(root)["llama"])
    return {"encoder__kind": "lm", "encoder__source": source, "encoder__rank": 3, "encoder__rate": 1.0}


@pytest.fixture(scope="module")
def first(root, keys, tmp_path_factory):
    """(folder, wire) of a run with llama alone."""
    folder = tmp_path_factory.mktemp("first")
    return folder, lw_jax.load_wire(tiny.train_in(folder, make(root, "llama", **keys)))


@pytest.fixture(scope="module")
def joined(root, keys, first, tmp_path_factory):
    cfg = make(root, "qwen", encoder__run=str(first[0]), seed=5, **keys)
    return lw_jax.load_wire(tiny.train_in(tmp_path_factory.mktemp("joined"), cfg))


def build(root, keys, first, seed):
    """Weights with which another reader's run begins."""
    cfg = make(root, "qwen", encoder__run=str(first[0]), seed=seed, **keys)
    return LatentWire(cfg, tiny.place(cfg)).build().trainable


def test_encoder_is_the_first_run_s_to_the_bit_and_only_the_new_adapter_learns(root, keys, first, joined):
    jax.tree.map(np.testing.assert_array_equal, joined.trainable["encoder"], first[1].trainable["encoder"])
    built = build(root, keys, first, seed=5)
    jax.tree.map(np.testing.assert_array_equal, built["encoder"], joined.trainable["encoder"])
    assert set(joined.trainable["adapters"]) == {"qwen"}
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), built["adapters"], joined.trainable["adapters"])
    assert moved["qwen"]["up"]["kernel"] and moved["qwen"]["gain"] and moved["qwen"]["skip"]["kernel"]


def test_messages_of_the_first_run_are_read_by_the_joined_one(first, joined):
    assert joined.encoder_fingerprint == first[1].encoder_fingerprint
    message = first[1].write(TEXT)
    assert message == joined.write(TEXT)
    assert isinstance(joined.read(message, "qwen", "What does Mira keep?"), str)
    with pytest.raises(UserError, match="qwen"):
        joined.read(message, "llama", "What does Mira keep?")
    with pytest.raises(UserError, match="llama"):
        first[1].read(message, SHARED, "What does Mira keep?")


def test_encoder_of_an_exported_wire_is_taken_where_its_readers_are_not(root, keys, first, joined, tmp_path):
    wire = tmp_path / "wire"
    assert tiny.call("export", first[1].recipe.cfg, first[0], wire=str(wire), dtype="fp32") == 0
    made = (wire / "config.json").read_text()
    (wire / "config.json").write_text(made.replace(str(tiny.readers(root)["llama"]), "/gone"))
    encoder = build(root, keys, (wire,), seed=5)["encoder"]
    jax.tree.map(np.testing.assert_array_equal, encoder, joined.trainable["encoder"])


def test_new_adapter_is_drawn_by_the_run_s_own_seed(root, keys, first):
    drawn = [build(root, keys, first, seed) for seed in (5, 6)]
    jax.tree.map(np.testing.assert_array_equal, drawn[0]["encoder"], drawn[1]["encoder"])
    assert not np.array_equal(*(one["adapters"]["qwen"]["up"]["kernel"] for one in drawn))


def test_checkpoint_is_tied_to_the_run_whose_encoder_it_took(root, first, joined):
    assert "of the run" in joined.recipe.identity()["encoder"]
    assert joined.recipe.identity()["encoder"] != first[1].recipe.identity()["encoder"]
