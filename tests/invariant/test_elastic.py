"""A checkpoint of one placement goes on under any other, in the middle of an epoch, as if nothing had happened."""

import shutil

import jax
import numpy as np
import pytest

from lw_jax.core import runtime
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import metrics
from tests import tiny

LOSS = 1e-5  # relative, fp32 after twelve optimizer steps: sums in another order
PARAMETERS = 3e-4  # absolute; Adam divides by the root of small squares, which magnifies rounding
STEPS, STOP = 12, 5  # an epoch of 64 cards is 8 steps of 8: stopped inside the first, ended inside the second
TENSOR = {"devices": 4, "model": 2, "strategy": "tensor"}


def make(root, **where) -> LatentWire:
    return tiny.make_recipe(root, train__steps=STEPS, train__checkpoint_every=STEPS, **where)


@pytest.fixture(scope="module")
def unbroken(root, tmp_path_factory):
    return tiny.curve(make(root, **TENSOR), tmp_path_factory.mktemp("unbroken"))


@pytest.fixture(scope="module")
def stopped(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    code, losses, _ = tiny.curve(make(root, **TENSOR), folder, stop=lambda step: step == STOP)
    assert code == runtime.REQUEUE and len(losses) == STOP
    return folder


ONWARD = {
    "single": {"devices": 1, "strategy": "single"},
    "split 2": {"devices": 2, "strategy": "split"},
    "hybrid3": {"devices": 3, "strategy": "hybrid3"},
    "replicate 8": {"devices": 8},
    "hybrid4 of 8": {"devices": 8, "strategy": "hybrid4"},
    "fsdp 4 accumulate 2": {"devices": 4, "strategy": "fsdp", "train__micro_batch": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONWARD)
def test_checkpoint_of_four_devices_goes_on_elsewhere_as_if_unbroken(name, root, unbroken, stopped, tmp_path, capsys):
    folder = shutil.copytree(stopped, tmp_path / "run")
    code, losses, trainable = tiny.curve(make(root, **ONWARD[name]), folder)
    assert code == 0
    assert f"resuming from step {STOP}" in capsys.readouterr().out
    rows = [row for row in metrics.read(folder / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(losses, unbroken[1], rtol=LOSS)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=PARAMETERS), trainable, unbroken[2])


@pytest.mark.slow
def test_checkpoint_of_readers_apart_comes_back_to_one_device(root, unbroken, tmp_path):
    folder = tmp_path / "run"
    tiny.curve(make(root, devices=3, strategy="hybrid3"), folder, stop=lambda step: step == STOP)
    _, losses, trainable = tiny.curve(make(root), folder)
    np.testing.assert_allclose(losses, unbroken[1], rtol=LOSS)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=PARAMETERS), trainable, unbroken[2])
