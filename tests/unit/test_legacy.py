"""The original's own published figures, and a plan beside them."""

import json

import pytest

from lw_jax.core.errors import UserError
from lw_jax.planning import legacy

EXACT = 1e-12  # relative: a handful of fp64 operations


def planned(**changes):
    """A plan of one H100 in the shape that `plan --json` prints."""
    chosen = {
        "strategy": "single",
        "mesh": "1x1",
        "remat": "none",
        "micro_batch": 7,
        "accumulation": 5,
        "weights_bytes": 31_250_000_000,
        "trainable_bytes": 1_500_000_000,
        "optimizer_bytes": 3_000_000_000,
        "activation_bytes": 21_000_000_000,
        "peak_bytes": 56_750_000_000,
    }
    found = {
        "target": "h100x1",
        "devices": 1,
        "compiled": True,
        "memory_bytes": 84_942_979_072,
        "limit_bytes": 67_954_383_257,
        "global_batch": 35,
        "chosen": chosen,
        "why": "the only one that fits",
    }
    return json.loads(json.dumps(found | changes))


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


@pytest.mark.parametrize(("utilisation", "batch"), [(0.85, 69), (0.80, 59)])
def test_one_h100_gets_the_published_batch(utilisation, batch):
    assert legacy.legacy_batch(utilisation=utilisation).per_gpu == batch


@pytest.mark.parametrize(("gpus", "total"), [(1, 69), (2, 139), (3, 208), (4, 278)])
def test_more_gpus_get_the_published_total_and_69_each(gpus, total):
    found = legacy.legacy_batch(gpus=gpus)
    assert (found.total, found.per_gpu) == (total, 69)
    assert 0.847 < found.utilisation <= 0.85


def test_fixed_terms_are_the_published_forty_gigabytes():
    found = legacy.legacy_batch()
    assert dict(found.fixed_gb) == pytest.approx(
        {"frozen weights": 32, "trained weights": 0.2, "optimizer": 1.2, "gradients": 0.2, "overhead": 6.4}, rel=EXACT
    )
    assert sum(found.fixed_gb.values()) == pytest.approx(40, rel=EXACT)
    assert found.sample_gb == pytest.approx(0.402653184, rel=EXACT)


def test_the_recommended_64_is_beyond_80_percent_by_its_own_formula():
    found = legacy.legacy_batch()
    held = sum(found.fixed_gb.values()) + 64 * found.sample_gb
    assert held / found.memory_gb == pytest.approx(0.822, abs=0.0005)


def test_a_card_that_the_fixed_terms_fill_gets_no_batch_and_no_negative_one():
    found = legacy.legacy_batch(memory_gb=40, utilisation=0.8)
    assert (found.per_gpu, found.total) == (0, 0)


@pytest.mark.parametrize("wrong", [{"memory_gb": 0}, {"utilisation": 1.5}, {"utilisation": 0}, {"gpus": 0}])
def test_input_outside_its_range_is_refused_with_its_values(wrong):
    (value,) = wrong.values()
    with pytest.raises(UserError, match=rf"{value:g}.*correct"):
        legacy.legacy_batch(**wrong)


def test_text_sets_every_term_beside_the_plans():
    found = legacy.text(planned())
    assert row(found, "frozen weights")[:2] == ["32.00", "31.25"]
    assert row(found, "trained weights")[:2] == ["0.20", "1.50"]
    assert row(found, "optimizer")[:2] == ["1.20", "3.00"]
    assert row(found, "gradients")[:2] == ["0.20", "-"]
    assert row(found, "overhead")[:2] == ["6.40", "-"]
    assert row(found, "all of these") == ["40.00", "35.75"]
    assert row(found, "activations of one example")[:2] == ["0.40", "3.00"]
    assert row(found, "peak") == ["67.78", "56.75"]
    assert "at its 85% of 80 GB: 69 a GPU (84.7% reached)" in found and "at 80%: 59 a GPU (79.7% reached)" in found
    assert "7 a GPU x 5 accumulated for a global batch of 35, within 68.0 GB = 80% of 84.9 GB" in found


def test_text_takes_the_targets_memory_and_number():
    found = legacy.text(planned(devices=3, memory_bytes=151_397_597_184, limit_bytes=113_548_197_888))
    expected = legacy.legacy_batch(memory_gb=141, gpus=3)
    assert f"{expected.per_gpu} a GPU, {expected.total} on 3 ({expected.utilisation:.1%} reached)" in found
    assert "the same formula at 75%" in found and "the same formula at 80%" in found


def test_text_says_so_where_nothing_fits():
    found = legacy.text(planned(chosen=None, why="nothing fits: single 1x1: too large"))
    assert "within 68.0 GB = 80% of 84.9 GB: nothing fits: single 1x1: too large" in found
    assert row(found, "frozen weights")[:2] == ["32.00", "-"]


def test_text_says_so_where_the_formula_finds_no_room():
    found = legacy.text(planned(memory_bytes=42_331_013_120, limit_bytes=33_864_810_496))
    assert "at its 85% of 40 GB: no room (92.0% taken before the first example)" in found


def test_an_estimate_is_not_called_compiled():
    assert "by arithmetic, not compiled" in legacy.text(planned(compiled=False))
