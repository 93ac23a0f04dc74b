"""lw_jax/training/hardware_record.py: the devices of a run, kept in its folder."""

import json
from typing import Any

import jax

from configs import base
from lw_jax.core import config
from lw_jax.training import hardware_record
from sharding import mesh as meshes
from sharding import placement

CFG = config.build(base.get_config())


def write(folder, *, data: int, step: int, model: int = 1, micro_batch: int = 8) -> dict[str, Any]:
    mesh = meshes.make(data=data, model=model, devices=jax.devices()[: data * model])
    placed = placement.one_mesh(mesh, ["llama"])
    hardware_record.write(folder, CFG, placed, card="h100", micro_batch=micro_batch, step=step)
    return json.loads((folder / hardware_record.FILE).read_text())


def test_resumed_run_keeps_its_record_and_begins_anew_on_other_devices(tmp_path) -> None:
    first = write(tmp_path, data=1, step=0)
    assert (first["kind"], first["card"], first["hosts"]) == (jax.devices()[0].device_kind, "h100", 1)
    assert write(tmp_path, data=1, step=70)["since_step"] == 0
    found = write(tmp_path, data=5, step=70)
    assert (found["since_step"], found["devices"]) == (70, 5) and found["since_time"] > 0
    assert write(tmp_path, data=5, step=90) == found


def test_run_that_begins_again_elsewhere_before_its_first_checkpoint_is_measured_from_there_on(tmp_path) -> None:
    assert write(tmp_path, data=1, step=0)["since_time"] == 0
    found = write(tmp_path, data=5, step=0)
    assert found["since_step"] == 0 and found["since_time"] > 0


def test_the_same_devices_on_other_axes_are_measured_from_there_on(tmp_path) -> None:
    write(tmp_path, data=4, step=0)
    assert write(tmp_path, data=2, model=2, step=70)["since_step"] == 70


def test_another_micro_batch_is_measured_from_there_on_also_one_that_an_older_version_did_not_record(tmp_path) -> None:
    assert write(tmp_path, data=1, step=0)["micro_batch"] == 8
    found = write(tmp_path, data=1, step=70, micro_batch=4)
    assert (found["micro_batch"], found["since_step"]) == (4, 70)
    del found["micro_batch"]
    (tmp_path / hardware_record.FILE).write_text(json.dumps(found))
    assert hardware_record.read(tmp_path).micro_batch == 0
    found = write(tmp_path, data=1, step=90, micro_batch=4)
    assert (found["micro_batch"], found["since_step"]) == (4, 90)
