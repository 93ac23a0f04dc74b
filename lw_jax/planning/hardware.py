"""Devices to plan for: this machine's, or stand-ins for a target's."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from lw_jax.core import validation
from lw_jax.core.config import Config
from lw_jax.core.config_keys import refuse
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus
from lw_jax.planning.gpus import Target
from lw_jax.training import memory_limit
from lw_jax.training.memory import Compile, compile_here
from lw_jax.training.memory_limit import MemoryLimit
from sharding import placement as placements
from sharding.mesh import Device

HERE = "here"
HOST_BYTES = 6e9  # Python, JAX, CUDA and tokenised data, of one process: assumed, not measured


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices to plan for, present or absent."""

    devices: Sequence[Device]  # or stand-ins of `gpus.compile_devices` that programs can be compiled for
    room: MemoryLimit | None  # of one device; None where the runtime reports no memory
    target: Target | None = None  # card and nodes, for the roofline; None where the card's peak rates are not known
    compile: Compile | None = compile_here  # None plans by arithmetic only
    name: str = HERE  # or the target's
    why_not_compiled: str = ""  # what is missing where a compiler was wanted

    @property
    def limit(self) -> MemoryLimit:
        if self.room is None:
            refuse("mesh.memory_gb", 0, "must be set (1e9 bytes): the system reports no memory of its devices.")
        return self.room

    @property
    def hosts(self) -> int:
        return self.target.hosts if self.target else len({device.process_index for device in self.devices})

    def figures(self) -> dict[str, Any]:
        return {
            "target": self.name,
            "devices": len(self.devices),
            "hosts": self.hosts,
            "per_host": len(self.devices) // self.hosts,
            "compiled": self.compile is not None,
            "why_not_compiled": self.why_not_compiled,
            "memory_bytes": self.limit.memory,
            "limit_bytes": self.limit.usable,
        }


def find(cfg: Config, target: str, *, estimate: bool = False) -> Hardware:
    """Returns a target's devices, or this machine's; without a compiler for them, or for an estimate, stand-ins.

    Raises:
        UserError: the target is not known, or an estimate needs more virtual CPU devices than there are.
        PlacementError: the configured placement does not go with the nodes.
    """
    if not target:
        check_processes(cfg, jax.device_count(), jax.process_count())
        return here(cfg)
    wanted = gpus.parse(target)
    check_processes(cfg, wanted.devices, wanted.hosts)
    try:
        return absent(cfg, wanted, compiler=not estimate)
    except gpus.CompilerAbsent as error:
        return dataclasses.replace(absent(cfg, wanted, compiler=False), why_not_compiled=str(error))


def here(cfg: Config) -> Hardware:
    devices, hosts = jax.devices(), jax.process_count()
    card = gpus.of_all_devices()
    return Hardware(devices, memory_limit.local(cfg), Target(card, len(devices) // hosts, hosts) if card else None)


def absent(cfg: Config, target: Target, *, compiler: bool = True) -> Hardware:
    """Returns stand-ins for a target's devices; without the compiler, CPU devices that only give shapes shardings."""
    room = memory_limit.of_devices(cfg, target.card.memory_bytes)
    if compiler:
        return Hardware(gpus.compile_devices(target), room, target, gpus.compile_lowered, target.name)
    devices = jax.devices("cpu")
    if len(devices) < target.devices:
        raise UserError(
            f"target {target.name}: an estimate for {target.devices} devices needs as many virtual CPU devices, this "
            f"process has {len(devices)}; set JAX_NUM_CPU_DEVICES={target.devices}"
        )
    return Hardware(devices[: target.devices], room, target, None, target.name)


def check_processes(cfg: Config, devices: int, processes: int) -> None:
    """Refuses what cannot run over so many processes, one a node."""
    validation.check_processes(cfg, processes)
    if cfg.mesh.placement != "auto":
        mesh = cfg.mesh
        placements.check_processes(mesh.placement, mesh.data, mesh.model, devices=devices, processes=processes)
