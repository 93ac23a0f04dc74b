"""A run whose messages are as long as their texts: equal on four devices, bit-equal after a stop."""

import pytest

from lw_jax.core import runtime
from tests import tiny

SIZES = {
    **{"encoder__slots": 9, "encoder__ratio": 13, "stages__pretrain__share": 0.5, "stages__pretrain__lengths": (12,)},
    **{"stages__answer__ratios": (11, 17), "only": "qwen", "stages__pretrain__reconstruct": 1.0},
}


@pytest.mark.slow
def test_curve_of_drawn_ratios_is_that_of_four_devices_and_of_a_resumed_run(root, tmp_path):
    one = tiny.unsaved_curve(tiny.make_recipe(root, **SIZES), tmp_path / "one")
    tiny.assert_same_curve(tiny.unsaved_curve(tiny.make_recipe(root, devices=4, **SIZES), tmp_path / "four"), one)
    code, *_ = tiny.curve(tiny.make_recipe(root, **SIZES), tmp_path / "stopped", stop=lambda step: step == 2)
    assert code == runtime.REQUEUE
    _, resumed, again = tiny.curve(tiny.make_recipe(root, **SIZES), tmp_path / "stopped")
    assert resumed == one[1]
    tiny.assert_equal_trees(again, one[2])
