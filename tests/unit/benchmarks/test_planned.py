"""benchmarks/planned.py holds plans against a machine; here it runs small and without a card, so that it cannot rot."""

import pytest

from benchmarks import planned


@pytest.mark.slow
def test_a_point_runs_its_compiled_step_here():
    small = {"data.question_tokens": "6", "encoder.window": "32"}
    row = planned.measure("configs/smoke.py", small, "qwen:1:full", steps=1)
    assert row["seconds"] > 0 and row["planned_bytes"] > 0
    assert row["peak_bytes"] is None and "calibrated_seconds" not in row  # a CPU tells neither
    assert not planned.is_off(row)
