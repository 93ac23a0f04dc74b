"""A run of LoRA pairs beside a frozen body: any placement (joined: test_joining.py)."""

import jax
import numpy as np
import pytest

from tests import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keys(root):
    source = str(tiny.readers(root)["llama"])
    return {"encoder__kind": "lm", "encoder__source": source, "encoder__rank": 3, "encoder__rate": 1.0}


@pytest.fixture(scope="module")
def whole(root, keys, tmp_path_factory):
    return tiny.unsaved_curve(tiny.make_recipe(root, **keys), tmp_path_factory.mktemp("whole") / "run")


def test_every_pair_moves_and_no_body_is_kept(root, keys, whole):
    code, _, trainable = whole
    assert code == 0 and set(trainable["encoder"]) == {"lora", "head"}
    start = jax.device_get(tiny.make_recipe(root, **keys).build().trainable["encoder"]["lora"])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), start, trainable["encoder"]["lora"])
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    "placed",
    [
        {"devices": 3, "train__micro_batch": 2},
        {"devices": 2, "strategy": "fsdp"},
        {"devices": 4, "model": 2, "strategy": "tensor"},
        {"devices": 3, "strategy": "hybrid3", "train__micro_batch": 4},
    ],
    ids=lambda placed: placed.get("strategy", "replicate"),
)
def test_every_placement_gives_the_curve_of_one_device(root, keys, whole, placed, tmp_path):
    _, losses, _ = tiny.unsaved_curve(tiny.make_recipe(root, **keys | placed), tmp_path / "run")
    np.testing.assert_allclose(losses, whole[1], rtol=tiny.LOSS)
