"""lw_jax/training/hardware_record.py: the devices of a run, kept in its folder."""

import json
from typing import Any

import jax
import pytest

from configs import base
from lw_jax import recipes
from lw_jax.commands import train
from lw_jax.core import config
from lw_jax.planning import gpus
from lw_jax.training import hardware_record
from sharding import mesh as meshes
from sharding import placement
from tests import tiny

CFG = config.build(base.get_config())


def write(folder, *, data: int, card: str = "") -> dict[str, Any]:
    mesh = meshes.make(data=data, model=1, devices=jax.devices()[:data])
    hardware_record.write(folder, CFG, placement.one_mesh(mesh, ["llama"]), card=card)
    return json.loads((folder / hardware_record.FILE).read_text())


def test_resumed_run_keeps_its_record_and_begins_anew_on_other_devices(tmp_path) -> None:
    first = write(tmp_path, data=1, card="h100")
    assert (first["kind"], first["card"], first["hosts"]) == (jax.devices()[0].device_kind, "h100", 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 70}\n')
    assert write(tmp_path, data=1)["since_step"] == 0
    found = write(tmp_path, data=5)
    assert (found["since_step"], found["devices"]) == (70, 5) and found["since_time"] > 0
    assert write(tmp_path, data=5) == found


def test_train_records_the_card_that_the_runtime_reports(tmp_path, tmp_path_factory, monkeypatch) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    cfg = tiny.make_config(tmp_path_factory.getbasetemp() / "readers", mesh__placement="single")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gpus, "of_device", lambda device: gpus.CARDS["h100"])
    monkeypatch.setattr(recipes, "make", stop)
    with pytest.raises(Stop):
        train.main(cfg, tmp_path)
    assert hardware_record.read(tmp_path).card == "h100"
