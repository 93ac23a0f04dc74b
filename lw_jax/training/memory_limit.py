"""Memory limit of a device: the bytes that a plan or a run may use."""

import dataclasses
import math

import jax

from lw_jax.core import processes, runtime
from lw_jax.core.config import Config


@dataclasses.dataclass(frozen=True)
class MemoryLimit:
    """Bytes of one device and the share of them that may be used."""

    memory: int
    utilisation: float

    @property
    def usable(self) -> int:
        return int(self.memory * self.utilisation)


def local(cfg: Config) -> MemoryLimit | None:
    """Returns the limit of this machine's devices: configured, else reported by the runtime, else None (CPU).

    The user's own share for XLA, which another program's on the card may need, is not exceeded.
    """
    limit = of_devices(cfg, runtime.device_memory() or 0)
    most = runtime.allocator_limit()
    if most and limit.memory:
        limit = dataclasses.replace(limit, utilisation=min(limit.utilisation, most / limit.memory))
    return limit if limit.memory else None


def agree(cfg: Config) -> Config:
    """Returns the configuration with the smallest limit of several processes' devices; all of them call it.

    From another limit a process would choose another placement or micro-batch, and its program would wait for the
    others' without end.
    """
    if jax.process_count() == 1:
        return cfg
    room = local(cfg)
    known = [MemoryLimit(*pair) for pair in processes.gather(room and (room.memory, room.utilisation)) if pair]
    if not known:
        return cfg
    least = min(known, key=lambda limit: limit.usable)
    mesh = dataclasses.replace(cfg.mesh, memory_gb=least.memory / 1e9, target_utilisation=least.utilisation)
    return dataclasses.replace(cfg, mesh=mesh)


def of_devices(cfg: Config, memory: int) -> MemoryLimit:
    """Returns the limit of devices with so many bytes; `mesh.memory_gb` overrides them."""
    return MemoryLimit(math.ceil(cfg.mesh.memory_gb * 1e9) or memory, cfg.mesh.target_utilisation)
