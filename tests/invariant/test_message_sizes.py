"""A run whose messages are as long as their texts: equal on four devices, bit-equal after a stop."""

import jax
import numpy as np
import pytest

from lw_jax.core import runtime
from tests import tiny
from tests.invariant.test_training import LOSS, PARAMETERS

SIZES = {
    **{"encoder__slots": 9, "encoder__ratio": 13, "stages__pretrain__share": 0.5, "stages__pretrain__lengths": (12,)},
    **{
        "stages__pretrain__ratios": (4, 8, 16),
        "stages__answer__ratios": (11, 17),
        "only": "qwen",
        "stages__pretrain__reconstruct": 1.0,
    },
}


@pytest.mark.slow
def test_curve_of_drawn_ratios_is_that_of_four_devices_and_of_a_resumed_run(root, tmp_path):
    _, losses, wanted = tiny.unsaved_curve(tiny.make_recipe(root, **SIZES), tmp_path / "one")
    _, four, trainable = tiny.unsaved_curve(tiny.make_recipe(root, devices=4, **SIZES), tmp_path / "four")
    np.testing.assert_allclose(four, losses, rtol=LOSS)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=PARAMETERS), trainable, wanted)
    code, *_ = tiny.curve(tiny.make_recipe(root, **SIZES), tmp_path / "stopped", stop=lambda step: step == 2)
    assert code == runtime.REQUEUE
    _, resumed, again = tiny.curve(tiny.make_recipe(root, **SIZES), tmp_path / "stopped")
    assert resumed == losses
    jax.tree.map(np.testing.assert_array_equal, again, wanted)


ALL = {
    **{"encoder__slots": 9, "stages__answer__sizes": "all", "stages__answer__ratios": (11, 17), "train__steps": 4},
    **{"adapter__kind": "kv"},
}


def test_curve_of_all_sizes_is_that_of_readers_on_devices_of_their_own(root, tmp_path):
    _, losses, wanted = tiny.unsaved_curve(tiny.make_recipe(root, **ALL), tmp_path / "one")
    split = {"devices": 2, "strategy": "split", "train__micro_batch": 2}
    _, apart, trainable = tiny.unsaved_curve(tiny.make_recipe(root, **split, **ALL), tmp_path / "apart")
    np.testing.assert_allclose(apart, losses, rtol=LOSS)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=PARAMETERS), trainable, wanted)
