"""lw_jax/training/reporter.py: what a row of metrics.jsonl holds."""

import pytest

from lw_jax.training.reporter import Reporter
from lw_jax.training.step_spec import StepSpec
from tests import tiny


@pytest.fixture
def reporter(tmp_path):
    """Reports every third step."""
    recipe = tiny.make_ttt(tmp_path, train__log_every=3, train__log_to=())
    return Reporter(StepSpec(recipe.cfg, recipe), tmp_path, None, quiet=True)


def test_a_row_has_the_means_of_the_steps_since_the_last_one_each_of_the_steps_that_have_it(reporter, tmp_path):
    with reporter.open_logs(0, revalidate=False):
        for step in range(1, 8):
            values = {"loss": float(step)} | ({"reconstruct/loss": 10.0 * step} if step % 2 else {})
            reporter.report(step, values, flush=step == 7)
    rows = [(row["step"], row["train/loss"], row["train/reconstruct/loss"]) for row in tiny.logged_rows(tmp_path)]
    assert rows == [(3, 2.0, 20.0), (6, 5.0, 50.0), (7, 7.0, 70.0)]
    assert reporter.last == {"loss": 7.0, "reconstruct/loss": pytest.approx(70.0)}


def test_steps_that_are_taken_again_count_once_and_those_before_them_still_count(reporter, tmp_path):
    for first, steps in ((0, (1, 2, 3, 4, 5)), (4, (5, 6))):  # memory ran out behind step 5, the state was that of 4
        with reporter.open_logs(first, revalidate=False):
            for step in steps:
                reporter.report(step, {"loss": 10.0**step})
    assert tiny.logged_losses(tmp_path) == [370.0, 370000.0]
