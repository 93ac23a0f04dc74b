"""Host memory check for virtual CPU devices, before any weights are fetched."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from lw_jax.core.errors import UserError
from lw_jax.training.memory import bytes_of
from sharding.placement import Placement

_MEMORY = Path("/proc/meminfo")
# Where control groups of versions 2 and 1 stand.
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_OWN = Path("/proc/self/cgroup")


def available() -> int | None:
    """Returns the bytes that this process may still take, swap included; None where the system does not report it."""
    if not _MEMORY.is_file():
        return None
    lines = (line.split() for line in _MEMORY.read_text(encoding="ascii").splitlines())
    meminfo = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    free = [meminfo["MemAvailable"] + meminfo.get("SwapFree", 0)]
    for limit, stat, key in _groups():
        words = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
        if words != "max" and stat.is_file():
            used = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
            free.append(max(0, int(words) - int(used[key])))
    return min(free)


def _groups() -> Iterator[tuple[Path, Path, str]]:
    """Yields limit, statistics and the key of what is in use (file caches left out) of this process's control groups.

    Each group up to the root: a Slurm job's limit is in its own, a container's in what it sees as the root.
    """
    lines = _OWN.read_text(encoding="utf-8").splitlines() if _OWN.is_file() else []
    own = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines)}
    for root, kind, limit, key in (
        (_V2, "", "memory.max", "anon"),
        (_V1, "memory", "memory.limit_in_bytes", "total_rss"),
    ):
        path = Path(own.get(kind, "/"))
        for group in (path, *path.parents):
            folder = root / group.relative_to("/")
            yield folder / limit, folder / "memory.stat", key


def held(readers: Mapping[str, int], placed: Placement) -> int:
    """Returns the bytes of frozen weights on this process's devices, every copy counted."""
    total, process = 0, jax.process_index()
    for name, component in placed.readers.items():
        local = sum(device.process_index == process for device in component.mesh.devices.flat)
        parts = {"tensor": component.mesh.shape["model"], "fsdp": component.mesh.shape["data"]}.get(component.table, 1)
        total += readers[name] * local // parts
    return total


def check(readers: Mapping[str, int], placed: Placement) -> None:
    """Refuses virtual devices whose frozen weights this machine's memory does not hold."""
    if placed.learner.devices.flat[0].platform != "cpu":
        return
    free, wanted = available(), held(readers, placed)
    if free is None or wanted <= free:
        return
    once = sum(readers.values())
    copies = f"{placed.devices} virtual devices" if placed.devices > 1 else "the CPU"
    remedy = (
        "take smaller readers or --config.llms.NAME.weights=nf4, or plan for GPUs: python run.py plan --target h100x4"
    )
    if placed.devices > 1 and once <= free:
        remedy = "one copy would fit: --config.mesh.placement=tensor, or fewer devices"
    raise UserError(
        f"placement {placed.strategy} on {copies}: the frozen weights take {bytes_of(wanted)} of this machine's memory "
        f"({bytes_of(once)} a copy), {bytes_of(free)} are free; nothing was fetched; {remedy}."
    )
