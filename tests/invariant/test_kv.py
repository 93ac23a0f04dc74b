"""A wire of keys and values: one curve on any devices, read by packed readers and by a late one."""

import jax
import numpy as np
import pytest

from lw_jax.inference import evaluation
from tests import tiny

pytestmark = pytest.mark.slow


TEXT, QUESTION = "Mara Ellis lives in Lisbon.", "Where does Mara Ellis live?"
ROWS = ("text", "latents", "shuffled", "zero")


def changes(root, **more):
    body = {"encoder__kind": "lm", "encoder__source": str(tiny.readers(root)["llama"]), "encoder__layers": 1}
    return {"adapter__kind": "kv", "adapter__start": "aligned"} | body | more


@pytest.fixture(scope="module")
def alone(root, tmp_path_factory):
    """(exit code, losses, weights) of one device."""
    return tiny.unsaved_curve(tiny.make_recipe(root, **changes(root)), tmp_path_factory.mktemp("alone") / "run")


PLACED = {
    "hybrid3 accumulate 2": {"devices": 3, "strategy": "hybrid3", "train__micro_batch": 4},
    "fsdp 8": {"devices": 8, "strategy": "fsdp"},
    "data 2 x tensor 4: heads of keys that do not divide": {"devices": 8, "model": 4, "strategy": "tensor"},
}


@pytest.mark.parametrize("name", PLACED)
def test_every_placement_starts_and_learns_as_one_device(name, root, alone, tmp_path):
    recipe = tiny.make_recipe(root, **changes(root, **PLACED[name]))
    tiny.assert_same_curve(tiny.unsaved_curve(recipe, tmp_path / "run"), alone)


def test_random_start_is_the_same_on_any_devices(root):
    one, four = (
        tiny.make_recipe(root, adapter__kind="kv", **where).build().trainable
        for where in ({}, {"devices": 4, "model": 2})
    )
    tiny.assert_near_trees(four, one, tiny.LOSS)


def said(wire, message: bytes) -> dict[str, str]:
    return {reader: wire.read(message, reader, QUESTION) for reader in ("llama", "qwen")}


@pytest.fixture(scope="module")
def one_device(root, alone):
    wire = tiny.wire_of(tiny.make_recipe(root, eval__rows=ROWS, **changes(root)), alone[2])
    message = wire.write(TEXT, bits=16, slots=3)
    return message, said(wire, message), evaluation.measure(wire).records


def test_other_latents_score_otherwise(one_device):
    of = {row: [one["nll"] for one in one_device[2] if (one["row"], one["reader"]) == (row, "qwen")] for row in ROWS}
    for control in ("shuffled", "zero"):
        assert not np.allclose(of["latents"], of[control], rtol=1e-4)


ELSEWHERE = {
    "tensor": {"devices": 4, "model": 2},
    "hybrid3, unstacked": {"devices": 3, "strategy": "hybrid3", "eval__layers": "unstacked"},
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_messages_are_answered_and_scored_as_on_one_device(name, root, alone, one_device):
    message, answers, scored = one_device
    wire = tiny.wire_of(tiny.make_recipe(root, eval__rows=ROWS, **changes(root, **ELSEWHERE[name])), alone[2])
    assert said(wire, message) == answers
    tiny.assert_same_scores(evaluation.measure(wire).records, scored)


def test_packed_readers_are_started_and_taught(root, alone, tmp_path):
    packed = {"llms__llama__weights": "int8", "llms__qwen__weights": "w8a8"}
    code, losses, _ = tiny.unsaved_curve(tiny.make_recipe(root, **changes(root, **packed)), tmp_path / "run")
    assert code == 0 and np.isfinite(losses).all()
    assert losses[0] == pytest.approx(alone[1][0], rel=0.05) and losses[0] != alone[1][0]


def test_a_reader_joins_with_keys_and_values_a_wire_of_either_kind(root, tmp_path):
    for kind in ("embeddings", "kv"):
        folder = tmp_path / kind
        first = tiny.make_recipe(root, only="llama", **changes(root, adapter__kind=kind))
        _, _, trained = tiny.curve(first, tiny.start_folder(folder, first.cfg))
        joined = tiny.make_recipe(root, only="qwen", **changes(root, encoder__run=str(folder)))
        code, losses, found = tiny.unsaved_curve(joined, tmp_path / f"{kind}-joined")
        assert code == 0 and np.isfinite(losses).all()
        jax.tree.map(np.testing.assert_array_equal, found["encoder"], trained["encoder"])
        assert "read" in found["adapters"]["qwen"]
