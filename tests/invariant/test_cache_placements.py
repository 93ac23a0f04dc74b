"""A wire of kind "cache" on one, two and four devices: the same messages, rows, answers and start."""

import jax
import numpy as np
import pytest

from lw_jax.inference import coded_evaluation
from sharding import place
from tests import tiny

CACHE = {"encoder__kind": "cache", "encoder__ratio": 2, "encoder__width": 200, "encoder__texts": 24, "train__steps": 0}
TEXT = "Mira keeps a copper lantern in the old mill. Tom keeps a silver bell in the new barn."
QUESTIONS = ("What does Mira keep?", "Where is the bell?", "Who is in the barn?")
pytestmark = pytest.mark.slow
PLACED = {
    "fsdp 2": {"devices": 2, "strategy": "fsdp"},
    "data 2 x tensor 2": {"devices": 4, "strategy": "tensor", "model": 2},
    "tensor 4, of 2 heads of keys": {"devices": 4, "strategy": "tensor", "model": 4},
    "split 2": {"devices": 2, "strategy": "split"},
}
BOTH = "data 2 x tensor 2"  # splits both the rows and the readers
NATS = 0.03  # of an answer of some 25 nats: whole numbers of the code that serve alike may be taken or not
ROUNDED = 0.01  # share of a code's whole numbers that other sums change, each beside all others
DECODED = 1e-3  # relative, of what a basis from other sums explains


def make(root, **placed):
    return tiny.make_recipe(root, **CACHE, message__bytes=130, eval__rows=("text", "latents"), **placed)


@pytest.fixture(scope="module")
def one(root):
    """The wire of one device with its codes, its message, answers and records."""
    recipe = make(root)
    wire = tiny.wire_of(recipe, recipe.build().trainable)
    return wire, *results(wire)


@pytest.fixture(scope="module")
def four(root):
    """The recipe on four devices, and what it starts with."""
    recipe = make(root, **PLACED[BOTH])
    return recipe, recipe.build()


def results(wire):
    message = wire.write(TEXT, ratio=(1, 2))
    answers = {name: wire.read(message, name, list(QUESTIONS)) for name in wire.recipe.wire.readers}
    records = coded_evaluation.measure(wire, batch=8).records
    return message, answers, records


@pytest.mark.parametrize("name", PLACED)
def test_both_readers_write_read_and_score_alike_in_every_placement(name, root, one):
    first, message, answers, records = one
    wire = tiny.wire_of(make(root, **PLACED[name]), first.trainable)
    assert wire.fingerprint == first.fingerprint
    own, told, found = results(wire)
    for reader in answers:
        ours, theirs = wire.section(own, reader), first.section(message, reader)
        np.testing.assert_array_equal(ours.levels, theirs.levels)
        apart = np.abs(ours.numbers.astype(int) - theirs.numbers)
        assert apart.max() <= 2 and (apart > 0).mean() <= ROUNDED
        # Either's message serves the other.
        assert wire.read(message, reader, list(QUESTIONS)) == first.read(message, reader, list(QUESTIONS))
    assert told == answers
    assert [(row["reader"], row["row"], row["index"]) for row in found] == [
        (row["reader"], row["row"], row["index"]) for row in records
    ]
    for ours, theirs in zip(found, records, strict=True):
        assert ours["positions"] == theirs["positions"] and ours["tokens"] == theirs["tokens"]
        assert ours["nll"] == pytest.approx(theirs["nll"], abs=NATS), (ours["reader"], ours["row"])


def test_a_start_on_several_devices_is_that_of_one(one, four):
    found = jax.device_get(four[1].trainable["codes"])
    for name, own in jax.device_get(one[0].trainable["codes"]).items():
        other = found[name]
        np.testing.assert_array_equal(other["fitted"], own["fitted"])
        np.testing.assert_allclose(other["tables"], own["tables"], atol=0.01)
        np.testing.assert_allclose(other["mean"], own["mean"], atol=1e-3)
        # A basis is determined up to signs and turns among equals: what it explains of the other's is compared.
        shared = np.linalg.norm(own["basis"] @ other["basis"].T) ** 2 / len(own["basis"])
        assert shared > 0.98
        np.testing.assert_allclose(other["variance"].sum(), own["variance"].sum(), rtol=DECODED)
        np.testing.assert_allclose(other["step"], own["step"], rtol=0.1)


def test_codes_lie_whole_on_every_device_of_their_reader(four):
    recipe, _ = four
    shapes = place.place_shapes(recipe.abstract.trainable, recipe.shardings.trainable)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(shapes))
