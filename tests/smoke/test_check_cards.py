"""The check of several cards, on virtual devices."""

import re

import jax
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is absent: pip install -r requirements-dev.txt")

from benchmarks import common
from examples import check_cards, elastic_demo
from lw_jax import recipes
from lw_jax.core import config
from sharding import placement
from tests import tiny

SMALL = {
    "encoder.kind": "bytes",
    "encoder.source": "",
    "encoder.layers": 1,
    "encoder.width": 24,
    "encoder.slots": 5,
    "adapter.hidden": 40,
    "adapter.start": "random",
    "data.cards": 64,
    "data.validation_limit": 16,
    "optim.warmup_steps": 2,
    "train.global_batch": 8,
    "compute.remat": "none",
}


def test_placements_are_those_that_so_many_devices_allow():
    assert list(check_cards.placements(1)) == ["single"]
    assert list(check_cards.placements(2)) == ["single", "replicate", "fsdp", "split", "tensor"]
    assert list(check_cards.placements(3)) == ["single", "replicate", "fsdp", "split", "hybrid3"]
    assert {"tensor", "hybrid3", "hybrid4"} < set(check_cards.placements(8))


@pytest.mark.parametrize("count", range(1, 9))
def test_no_placement_is_refused_on_so_many_devices(count):
    cfg = common.load("configs/smoke.py", {"compute.remat": "none"})
    for placed in check_cards.placements(count).values():
        where = {"data": placed.data, "model": placed.model, "devices": jax.devices()[:count]}
        found = placement.place(placed.strategy, recipes.reader_bytes(cfg), **where)
        assert found.devices == placed.devices and recipes.make(cfg, found, outline=True).placed().frozen


@pytest.mark.parametrize(("shift", "apart", "code"), [(0.9e-4, 0.0, 0), (1.1e-4, 0.0, 1), (0.0, 1.1e-4, 1)])
def test_a_curve_that_differs_or_a_run_that_is_lost_gives_code_1(shift, apart, code, monkeypatch, capsys):
    curves = {"single": [1.7, 1.1], "replicate": [1.7, 1.1 * (1 + shift)]}
    monkeypatch.setattr(
        elastic_demo, "train", lambda placed, *_: ("somewhere", curves.get(placed.strategy, [1.7, 1.1]))
    )
    found = {"line": "device: 2 x card", "devices": 2, "gb_per_second": 99.0}
    monkeypatch.setattr(check_cards, "measure_all_reduce", lambda environ: found)
    monkeypatch.setattr(check_cards, "stop_and_resume", lambda *_: apart)
    assert check_cards.main([]) == code
    assert "| devices | 2 x card |" in capsys.readouterr().out


@pytest.mark.slow
def test_two_virtual_devices_reduce_train_alike_and_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check_cards, "MEGABYTES", 1)
    monkeypatch.setattr(check_cards, "STEPS_STOPPED", 100)
    asked = check_cards.placements
    monkeypatch.setattr(check_cards, "placements", lambda n: {key: asked(n)[key] for key in ("single", "split")})
    values = SMALL | {f"llms.{name}.source": path for name, path in tiny.readers(tmp_path / "readers").items()}
    words = config.flags(values)
    assert check_cards.main(["--virtual", "2", "--steps", "3", *words]) == 0
    told = capsys.readouterr().out
    assert "2 virtual devices" in told and "all alike" in told
    assert "| single | data=1 x model=1 on 1 cpu; 1 of 2" in told and "qwen on 1" in told
    assert float(re.findall("last loss ([0-9.]+)", told)[0]) > 1, "nats of readers that have learned nothing"
    assert re.search(r"\| all-reduce \| 1 MB a card \| [0-9.]+ GB/s \|", told)
    assert re.search(r"\| kill, resume \| split, 100 steps \| 0.0e\+00 from a whole run \|", told)
