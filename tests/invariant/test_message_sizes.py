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
