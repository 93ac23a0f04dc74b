"""lw_jax/slurm/size_comparison.py: prices of other numbers of the same GPU."""

from pathlib import Path

from lw_jax.planning import plan_cache
from lw_jax.planning.plans import StepPlan
from lw_jax.slurm import size_comparison
from tests.unit.slurm.test_job import CHOSEN, PLAN, planned, resolve


def sized(count: int, hours: float, *, compiled: bool = True) -> StepPlan:
    return planned(target=f"h100x{count}", devices=count, hours=hours, compiled=compiled)


def test_compiled_and_estimated_hours_never_share_a_column() -> None:
    """Of the issue: one H100 estimated at 0.93 h beside four compiled at 0.39 h said that four cost 1.75 times more."""
    rows = [
        sized(4, 0.39),
        sized(1, 1.57),
        *(sized(n, h, compiled=False) for n, h in ((1, 0.93), (2, 0.47), (4, 0.24))),
    ]
    head, one, two, four, note = size_comparison.compare(rows, hours=0.39)
    assert head.split() == ["size", "GPUs", "hours", "GPU-hours", "est.", "hours", "est.", "GPU-hours", "plan"]
    assert one.split() == ["h100x1", "1", "1.57", "1.6", "0.93", "0.9", "tensor"]
    assert two.split() == ["h100x2", "2", "-", "-", "0.47", "0.9", "tensor", "(estimate)"]
    assert four.split() == ["h100x4", "4", "0.39", "1.6", "0.24", "1.0", "tensor"]
    assert note.startswith("est.:")


def test_hours_of_the_user_scale_every_size_alike() -> None:
    head, one, four, note = size_comparison.compare([sized(4, 0.4), sized(1, 1.6)], hours=0.8)
    assert "est." not in head
    assert (one.split()[2:4], four.split()[2:4]) == (["3.20", "3.2"], ["0.80", "3.2"])
    assert note == "every size x 2.00: the job's hours over the predicted ones"


def test_other_sizes_are_the_plans_that_are_kept_else_all_are_estimated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(
        size_comparison, "make", lambda _, target, estimate: planned(target=target, compiled=not estimate)
    )
    cfg = resolve()
    found = size_comparison.other_sizes(cfg, PLAN)
    assert [(one.target, one.compiled) for one in found] == [(f"h100x{n}", False) for n in (1, 2, 4)]
    hours = cfg.train.steps * CHOSEN.step_seconds / 3600
    for count in (1, 2):
        plan_cache.write(plan_cache.path(cfg, f"h100x{count}"), sized(count, 0.0))
    found = size_comparison.other_sizes(cfg, PLAN)
    assert [(one.target, one.compiled, one.hours) for one in found] == [
        ("h100x1", True, hours),
        ("h100x2", True, hours),
    ]
    found = size_comparison.other_sizes(cfg, planned(compiled=False))
    assert [one.compiled for one in found] == [False, False], "an estimated job is compared with estimates alone"
