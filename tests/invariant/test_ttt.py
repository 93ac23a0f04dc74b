"""A Test-Time-Training run is the same on any number of devices, in any pieces, stopped or not; and it learns."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core import runtime
from lw_jax.training import trainer
from lw_jax.training.step_spec import StepSpec
from tests import tiny

pytestmark = pytest.mark.slow


LEARNED = 0.05  # nats a byte after having read the same eight windows again and again


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def alone(root, tmp_path_factory):
    """(folder, exit code, losses, weights) of the run that every other is held to: one device, validated twice."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, *tiny.curve(tiny.make_ttt(root, train__eval_every=3), folder)


PLACED = {
    "fsdp 8": {"devices": 8, "strategy": "fsdp"},
    "fsdp 3 accumulate 2": {"devices": 3, "strategy": "fsdp", "train__micro_batch": 2},
    "chunked loss, wider table": {"devices": 2, "compute__logits_chunk": 8, "ttt__table_multiple": 64},
}


@pytest.mark.parametrize("name", PLACED)
def test_curve_is_that_of_one_device(name, root, alone, tmp_path):
    recipe = tiny.make_ttt(root, train__eval_every=3, **PLACED[name])
    code, losses, trainable = tiny.curve(recipe, tmp_path / "run")
    assert losses[-1] < losses[0]
    trainable["embed"] = trainable["embed"][: recipe.model.vocab]
    tiny.assert_same_curve((code, losses, trainable), alone[1:])
    ours, theirs = (tiny.logged_rows(folder, "validation/loss") for folder in (tmp_path / "run", alone[0]))
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in other.keys() - {"time"}:
            np.testing.assert_allclose(one[key], other[key], rtol=tiny.PARAMETERS, err_msg=key)


VARIANTS = {
    "mlp mamba, segments": {
        **{"ttt__inner": "mlp", "ttt__inner_rate": 0.1, "ttt__backbone": "mamba"},
        **{"ttt__segments": 2, "ttt__length": 8},
    },
    "kernel": {"ttt__form": "kernel", "ttt__chunk": 16, "ttt__length": 32, "ttt__width": 48},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_models_and_segments_are_spread_alike(name, root, tmp_path):
    changes = {"train__steps": 3, "ttt__layers": 1, **VARIANTS[name]}
    _, losses, _ = tiny.curve(tiny.make_ttt(root, **changes), tmp_path / "alone")
    _, spread, _ = tiny.curve(tiny.make_ttt(root, devices=4, strategy="fsdp", **changes), tmp_path / "spread")
    np.testing.assert_allclose(spread, losses, rtol=tiny.LOSS)


def test_fsdp_splits_weights_and_moments_over_the_devices(root):
    def held(**where) -> float:
        recipe = tiny.make_ttt(root, **where)
        leaves = jax.tree.leaves(StepSpec(recipe.cfg, recipe).state)
        return sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    one, four, eight = held(), held(devices=4, strategy="fsdp"), held(devices=8, strategy="fsdp")
    assert one == held(devices=8)
    small = 0.06 * one  # norms, fast weights and rates, which stay whole
    assert one / 4 < four < one / 4 + small and one / 8 < eight < one / 8 + small


def test_fsdp_keeps_what_is_split_split_through_a_run(root):
    recipe = tiny.make_ttt(root, devices=4, strategy="fsdp", train__steps=2)
    run = trainer.Run(recipe.cfg, recipe, None, None)
    assert run.train(lambda step: False) == 0
    for leaf in (run.state["trainable"]["layers"]["q"], run.state["trainable"]["embed"]):
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size


def test_stopped_run_goes_on_bit_equal(root, alone, tmp_path):
    folder = tmp_path / "run"
    make = functools.partial(tiny.make_ttt, root, train__eval_every=3)
    code, losses, _ = tiny.curve(make(), folder, stop=lambda step: step == 4)
    assert code == runtime.REQUEUE and losses == alone[2][:4]
    code, losses, trainable = tiny.curve(make(), folder)
    assert code == 0 and losses == alone[2]
    jax.tree.map(np.testing.assert_array_equal, trainable, alone[3])
    rows = tiny.untimed_rows(folder)
    assert rows == tiny.untimed_rows(alone[0])
    assert {"train/loss", "validation/nll/bigram", "validation/inner/after"} <= {key for row in rows for key in row}


def test_each_step_of_a_stopped_run_is_in_one_row_of_the_log(root, alone, tmp_path):
    folder = tmp_path / "run"
    for stopped in (5, None):
        recipe = tiny.make_ttt(root, train__log_every=4)
        tiny.curve(recipe, folder, stop=lambda step, last=stopped: step == last)
    ends = [0, *(row["step"] for row in tiny.logged_rows(folder))]
    assert {4, 5} <= set(ends)
    assert tiny.logged_losses(folder) == [np.mean(alone[2][begin:end]) for begin, end in itertools.pairwise(ends)]


def test_checkpoint_of_one_device_goes_on_split_over_four(root, alone, tmp_path):
    folder = tmp_path / "run"
    tiny.curve(tiny.make_ttt(root), folder, stop=lambda step: step == 4)
    tiny.assert_same_curve(tiny.curve(tiny.make_ttt(root, devices=4, strategy="fsdp"), folder), alone[1:])


@pytest.mark.parametrize("inner", ["linear", "mlp"])
def test_one_batch_is_learned_by_heart(root, inner):
    recipe = tiny.make_ttt(
        root, ttt__inner=inner, ttt__inner_rate=0.3, ttt__width=48, optim__learning_rate=1e-2, optim__weight_decay=0.0,
        train__steps=150,
    )  # fmt: skip
    batch = recipe.data_schedule().batch(0, global_batch=8, seed=0, share=slice(0, 8))
    program, state, frozen, batch = tiny.start_step(recipe, batch)
    first = None
    for _ in range(150):
        state, values = program.step(state, frozen, batch)
        first = first or float(values["loss"])
    assert abs(first - np.log(257)) < 0.2 and float(values["loss"]) < LEARNED


def test_decay_reaches_every_leaf(root):
    recipe = tiny.make_ttt(root, optim__learning_rate=1e-2, optim__weight_decay=0.5)
    trainable = jax.tree.map(jnp.ones_like, recipe.build().trainable)
    optimizer = StepSpec(recipe.cfg, recipe).optimizer
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, trainable), optimizer.init(trainable), trainable)
    assert all(float(leaf.max()) < 0 for leaf in jax.tree.leaves(updates))
