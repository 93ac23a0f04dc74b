"""lw_jax/planning/host_memory.py: what virtual devices would hold of the machine's memory."""

import jax
import pytest

from lw_jax.core.errors import UserError
from lw_jax.planning import host_memory, planner
from sharding import placement as placements
from tests import tiny

READERS = {"llama": 16_000, "qwen": 15_000}


@pytest.mark.parametrize(
    ("strategy", "data", "model", "copies"),
    [
        ("single", -1, 1, (1, 1)),
        ("replicate", 4, 1, (4, 4)),
        ("fsdp", 4, 1, (1, 1)),
        ("tensor", 2, 2, (2, 2)),
        ("split", -1, 1, (2, 2)),
        ("hybrid3", -1, 1, (1, 1)),
        ("hybrid4", -1, 1, (1, 1)),
    ],
)
def test_every_copy_of_the_frozen_weights_counts(strategy, data, model, copies):
    count = 3 if strategy == "hybrid3" else 4
    placed = placements.place(strategy, READERS, data=data, model=model, devices=jax.devices()[:count])
    assert host_memory.held(READERS, placed) == sum(n * size for n, size in zip(copies, READERS.values(), strict=True))


def test_four_replicas_that_the_machine_cannot_hold_are_refused_before_they_are_fetched(tmp_path, monkeypatch):
    """Of the issue: h100x4.py on four virtual devices went on to fetch 31 GB four times."""
    cfg = tiny.make_config(tmp_path, mesh__placement="replicate", mesh__data=4)
    once = sum(planner.recipes.reader_bytes(cfg).values())
    monkeypatch.setattr(host_memory, "available", lambda: 4 * once)
    assert planner.resolve_auto(cfg)[1].devices == 4
    monkeypatch.setattr(host_memory, "available", lambda: 4 * once - 1)
    with pytest.raises(UserError, match=r"4 virtual devices.*nothing was fetched; one copy would fit"):
        planner.resolve_auto(cfg)
    monkeypatch.setattr(host_memory, "available", lambda: once - 1)
    with pytest.raises(UserError, match=r"weights=nf4, or plan for GPUs"):
        planner.resolve_auto(cfg)
    monkeypatch.setattr(host_memory, "available", lambda: None)
    assert planner.resolve_auto(cfg)[1].devices == 4, "a system that tells nothing is no obstacle"


def test_memory_is_the_least_of_the_systems_and_the_containers(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\nHugePages_Total: 0\nSwapFree: 100 kB\n")
    monkeypatch.setattr(host_memory, "_MEMORY", tmp_path / "meminfo")
    (tmp_path / "cgroup").write_text("3:cpu,cpuacct:/\n0::/slurm/job_7\n")
    monkeypatch.setattr(host_memory, "_OWN", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_V2", tmp_path)
    monkeypatch.setattr(host_memory, "_V1", tmp_path / "none")
    group = tmp_path / "slurm" / "job_7"
    group.mkdir(parents=True)
    limit, stat = group / "memory.max", group / "memory.stat"
    assert host_memory.available() == 600 * 1024
    stat.write_text("anon 1000\nfile 4000\n")  # what files are cached in can be given back
    limit.write_text("max\n")
    assert host_memory.available() == 600 * 1024
    limit.write_text("5000\n")
    assert host_memory.available() == 4000
    (tmp_path / "memory.max").write_text("3500\n")  # of the container around the job
    (tmp_path / "memory.stat").write_text("anon 1000\n")
    assert host_memory.available() == 2500
    monkeypatch.setattr(host_memory, "_MEMORY", tmp_path / "none")
    assert host_memory.available() is None
