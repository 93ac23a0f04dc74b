"""A run of LoRA pairs beside a frozen body: any placement, opened, joined."""

import jax
import numpy as np
import pytest

import lw_jax
from lw_jax.core.errors import UserError
from lw_jax.core.types import SHARED
from tests import tiny

pytestmark = pytest.mark.slow

TEXT, QUESTION = "Mara Ellis lives in Lisbon.", "Where does Mara Ellis live?"


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


def test_wire_opens_and_another_reader_joins_it(root, keys, tmp_path):
    def run(reader, **changes):
        cfg = tiny.make_config(
            root,
            only=reader,
            **keys | {"mesh__placement": "single", "train__steps": 3, "train__checkpoint_every": 3} | changes,
        )
        return lw_jax.load_wire(tiny.train_in(tmp_path / reader, cfg))

    first = run("llama")
    joined = run("qwen", encoder__run=str(tmp_path / "llama"), seed=5)
    jax.tree.map(np.testing.assert_array_equal, joined.trainable["encoder"], first.trainable["encoder"])
    message = first.write(TEXT)
    assert message == joined.write(TEXT)
    assert isinstance(joined.read(message, "qwen", QUESTION), str)
    with pytest.raises(UserError, match="llama"):
        first.read(message, SHARED, QUESTION)
