"""A checkpoint of one placement resumes under any other, in the middle of an epoch, as if nothing had happened."""

import jax
import numpy as np
import pytest

from lw_jax.core import runtime
from lw_jax.recipes.latentwire import LatentWire
from tests import tiny

PARAMETERS = 3e-4  # absolute; Adam divides by the root of small squares, which magnifies rounding
STEPS = 12  # an epoch of 64 cards is 8 steps of 8: the chain stops inside the first and inside the second

# One run, moved every two steps: from several devices to readers apart, to three that do not divide the batch, to one,
# to more devices than before.
CHAIN = {
    2: {"devices": 4, "model": 2, "strategy": "tensor"},
    4: {"devices": 3, "strategy": "hybrid3"},
    6: {"devices": 3},
    8: {"devices": 1, "strategy": "single"},
    10: {"devices": 4, "strategy": "fsdp", "train__micro_batch": 1},
    STEPS: {"devices": 8, "strategy": "hybrid4"},
}


def make(root, **where) -> LatentWire:
    return tiny.make_recipe(root, train__steps=STEPS, train__checkpoint_every=STEPS, **where)


@pytest.mark.slow
def test_run_moved_through_six_placements_is_the_unbroken_one(root, tmp_path, capsys):
    _, wanted, unbroken = tiny.unsaved_curve(make(root), tmp_path / "unbroken")
    begun = 0
    for end, where in CHAIN.items():
        capsys.readouterr()
        code, losses, trainable = tiny.curve(
            make(root, **where), tmp_path / "run", stop=lambda step, end=end: step == end < STEPS
        )
        assert code == (0 if end == STEPS else runtime.REQUEUE)
        assert begun == 0 or f"from step {begun}" in capsys.readouterr().out
        np.testing.assert_allclose(
            losses, wanted[:end], rtol=tiny.LOSS, err_msg=f"steps {begun + 1} to {end} on {where}"
        )
        begun = end
    assert [row["step"] for row in tiny.logged_rows(tmp_path / "run")] == list(range(1, STEPS + 1))
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=PARAMETERS), trainable, unbroken)
