"""hardware.json: the devices of a run, so that its step times can be reused for a job on the same ones."""

import json
import time
from pathlib import Path

import jax
import msgspec

from lw_jax.core import schema
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.files import write_whole
from sharding.placement import Placement

FILE = "hardware.json"


class HardwareRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, placement and micro-batch of a run, and the step and time since when it has them."""

    kind: str  # as the runtime reports it, for people
    card: str  # of `gpus.CARDS`; empty: none of them
    devices: schema.Size  # in use
    hosts: schema.Size
    strategy: str
    remat: str
    micro_batch: schema.Index = 0  # as it was taken; 0: nothing is trained
    since_step: schema.Index = 0
    since_time: float = 0.0
    data: schema.Size  # data axis; the model axis has the other devices


def read(workdir: Path) -> HardwareRecord:
    """Returns the record of a run's folder; raises UserError where there is none or it cannot be read."""
    try:
        return schema.read(workdir / FILE, HardwareRecord, remedy="the file must be as training wrote it: remove it")
    except FileNotFoundError as error:
        rule = "training writes it: let a run of a few steps be made there"
        raise UserError(f"{workdir / FILE}: missing, so that nobody knows what was measured on; {rule}") from error


def write(workdir: Path, cfg: Config, placement: Placement, *, card: str, micro_batch: int, step: int) -> None:
    """Records the devices of a run that goes on behind `step`.

    On other devices, or with another micro-batch, it is measured from there on.
    """
    record = HardwareRecord(
        kind=placement.kind,
        card=card,
        devices=placement.devices,
        hosts=jax.process_count(),
        strategy=placement.strategy,
        remat=cfg.compute.remat,
        micro_batch=micro_batch,
        data=placement.data,
    )
    began = (workdir / FILE).exists()  # maybe to end before its first checkpoint: its devices.jsonl is there
    if began:
        before = read(workdir)
        if msgspec.structs.replace(before, since_step=0, since_time=0.0) == record:
            return
    if began or step:
        record = msgspec.structs.replace(record, since_step=step, since_time=time.time())
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / FILE, json.dumps(msgspec.structs.asdict(record), indent=2) + "\n")
