"""benchmarks/planned.py holds plans against a machine; here it runs small and without a card, so that it cannot rot."""

import pytest

from benchmarks import planned
from lw_jax.core.errors import UserError
from tests import tiny

ROW = {
    **{"point": "both:8:none", "planned_bytes": 50_000_000_000, "micro_batch": 8, "remat": "none"},
    **{"peak_bytes": 51_000_000_000, "predicted_seconds": 2.5, "calibrated_seconds": 2.0, "seconds": 2.1},
}


@pytest.mark.slow
def test_a_point_runs_its_compiled_step_here(tmp_path_factory):
    cfg = tiny.make_config(tmp_path_factory.getbasetemp() / "readers")
    row = planned.run(cfg, "qwen:1:full", steps=1, shares={})
    assert row["seconds"] > 0 and row["planned_bytes"] > 0
    assert row["peak_bytes"] is None and "calibrated_seconds" not in row  # a CPU tells neither
    assert not planned.is_off(row)


def test_a_point_keeps_only_its_readers_and_two_micro_batches_a_step(tmp_path_factory):
    cfg, micro = planned.at(tiny.make_config(tmp_path_factory.getbasetemp() / "readers"), "llama:3:full")
    assert (list(cfg.llms), cfg.compute.remat, micro) == (["llama"], "full", 3)
    assert cfg.train.global_batch == 2 * cfg.train.micro_batch == 6


@pytest.mark.parametrize("point", ["both:2", "gemma:2:none", "both:many:none", "both:2:some"])
def test_a_point_of_other_words_is_refused(point, tmp_path_factory):
    with pytest.raises(UserError, match="write READERS:MICRO_BATCH:REMAT, READERS one of both, llama, qwen"):
        planned.at(tiny.make_config(tmp_path_factory.getbasetemp() / "readers"), point)


@pytest.mark.parametrize(
    ("change", "off"),
    [
        ({}, False),
        ({"peak_bytes": 52_000_000_000}, True),
        ({"peak_bytes": 48_000_000_000}, True),
        ({"peak_bytes": None}, False),
        ({"seconds": 2.3}, True),
        ({"seconds": 1.7}, True),
    ],
)
def test_a_point_is_off_beyond_three_percent_of_memory_or_ten_of_time(change, off):
    assert planned.is_off(ROW | change) is off
