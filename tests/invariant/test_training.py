"""Equal things are equal: optimizers, arithmetic, resumption (placements: test_placements.py); seeds change the run."""

import dataclasses
import json
import signal

import jax
import numpy as np
import pytest

from lw_jax.core import runtime
from lw_jax.core.errors import UserError
from lw_jax.training.checkpoint import Checkpointer
from tests import tiny
from tests.tiny import curve


@pytest.mark.slow
def test_muon_s_curve_is_the_same_however_it_is_computed(root, tmp_path):
    """Of the accumulated gradients, where a matrix is split over data, and where it is split over both axes."""
    muon = {"optim__kind": "muon"}
    _, wanted, _ = tiny.unsaved_curve(tiny.make_recipe(root, **muon), tmp_path / "single")
    split = {
        "fsdp": {"devices": 4, "strategy": "fsdp", "train__micro_batch": 1},
        "tensor": {"devices": 8, "model": 4, "strategy": "tensor"},
    }
    for name, where in split.items():
        _, losses, _ = tiny.unsaved_curve(tiny.make_recipe(root, **muon, **where), tmp_path / name)
        np.testing.assert_allclose(losses, wanted, rtol=tiny.LOSS, err_msg=name)


@pytest.mark.slow
def test_bf16_arithmetic_stays_close_and_trainable_weights_stay_fp32(root, single, tmp_path):
    changes = {"compute__dtype": "bf16", "llms__llama__weights": "bf16", "llms__qwen__weights": "bf16"}
    # The backward pass of jax's own attention promotes bf16 with fp32 while it is lowered, outside any code of ours.
    with jax.numpy_dtype_promotion("standard"):
        _, losses, trainable = tiny.unsaved_curve(tiny.make_recipe(root, **changes), tmp_path / "run")
    np.testing.assert_allclose(losses, single[1], rtol=0.02)  # bf16 keeps 8 bits of each product
    assert losses != single[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(trainable)} == {np.dtype(np.float32)}


def test_the_placement_splits_the_frozen_weights(root):
    recipe = tiny.make_recipe(root, devices=8, model=4, strategy="tensor")
    q = recipe.load_frozen()["qwen"]["layers"]["q"]
    assert q.sharding.shard_shape(q.shape) == (q.shape[0], q.shape[1] // 4, *q.shape[2:])


@pytest.fixture(scope="module")
def resumed(root, tmp_path_factory):
    """(losses until the signal, exit code, losses, weights, folder) of a run that a signal stopped at step 4."""

    def signal_self(step):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
        return preemption.requested(step)

    folder = tmp_path_factory.mktemp("resumed") / "run"
    with runtime.Preemption() as preemption:
        code, before, _ = curve(tiny.make_recipe(root), folder, stop=signal_self)
    assert code == runtime.REQUEUE
    assert (folder / "checkpoints" / "4").is_dir()
    return before, *curve(tiny.make_recipe(root), folder), folder


def test_a_run_stopped_by_a_signal_saves_and_resumes_bit_equal(single, resumed):
    before, code, losses, trainable, _ = resumed
    assert before == single[1][:4]
    assert code == 0
    assert losses == single[1]
    jax.tree.map(np.testing.assert_array_equal, trainable, single[2])


@pytest.mark.slow
def test_another_seed_trains_other_weights(root, single, tmp_path):
    _, losses, _ = tiny.unsaved_curve(tiny.make_recipe(root, seed=1, train__steps=2), tmp_path / "run")
    assert not set(losses) & set(single[1])
    one, other = (tiny.make_recipe(root, seed=seed).build().trainable for seed in (0, 1))
    assert not np.array_equal(*(found["adapters"]["llama"]["up"]["kernel"] for found in (one, other)))


def test_other_frozen_weights_are_refused_by_name(root, resumed, tmp_path):
    folder = resumed[-1]
    other = tiny.write_reader(tmp_path / "other", "llama", seed=9)
    recipe = tiny.make_recipe(root)
    llms = recipe.cfg.llms | {"llama": dataclasses.replace(recipe.cfg.llms["llama"], source=str(other))}
    recipe = type(recipe)(dataclasses.replace(recipe.cfg, llms=llms), recipe.placement)
    with pytest.raises(UserError, match="llms/llama"):
        Checkpointer(folder / "checkpoints", keep=2, identity=recipe.identity())


def test_metrics_have_the_promised_names(single):
    row = json.loads((single[3] / "metrics.jsonl").read_text().splitlines()[0])
    assert {"step", "examples", "train/loss", "train/nll/llama", "train/nll/qwen", "train/learning_rate"} <= row.keys()
