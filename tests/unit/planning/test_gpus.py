"""Which targets a word names, what a live device is, and how the compiler's absence is told."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from lw_jax.core import runtime
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus
from tests import commands

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("word", "card", "per_host", "hosts", "name"),
    [
        ("h100x4", "h100", 4, 1, "h100x4"),
        ("H200x1", "h200", 1, 1, "h200x1"),
        ("l40s", "l40s", 1, 1, "l40sx1"),
        ("a100_40x2", "a100_40", 2, 1, "a100_40x2"),
        ("a100-40x3", "a100_40", 3, 1, "a100_40x3"),
        ("a100_80gbx8", "a100_80", 8, 1, "a100_80x8"),
        ("h100-80gbx2", "h100", 2, 1, "h100x2"),
        ("rtx4090x2", "rtx4090", 2, 1, "rtx4090x2"),
        ("rtx4090", "rtx4090", 1, 1, "rtx4090x1"),
        ("v100_16x8", "v100_16", 8, 1, "v100_16x8"),
        ("2xh100x8", "h100", 8, 2, "2xh100x8"),
        ("3xb200x5", "b200", 5, 3, "3xb200x5"),
        ("h100x16", "h100", 8, 2, "2xh100x8"),
    ],
)
def test_word_names_cards_and_nodes(word, card, per_host, hosts, name):
    target = gpus.parse(word)
    assert (target.card.name, target.per_host, target.hosts) == (card, per_host, hosts)
    assert target.name == name and gpus.parse(name) == target and target.devices == hosts * per_host


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("h10x4", "Did you mean 'h100'?"),
        ("a100x4", "the cards are h100, h200, a100_40, a100_80"),
        ("h100x0", "at least one of each"),
        ("0xh100x8", "at least one of each"),
        ("h100x12", "say 2xh100x8"),
        ("2xh100x16", "say 4xh100x8"),
        ("4", "a target is [NODESx]CARD[xGPUS]"),
        ("h100x", "no known card"),
    ],
)
def test_unknown_target_is_refused_with_the_rule(word, told):
    with pytest.raises(UserError) as caught:
        gpus.parse(word)
    assert told in str(caught.value) and repr(word) in str(caught.value)


def test_link_is_nvlink_inside_a_node_and_the_nodes_ports_between_them():
    target = gpus.parse("2xh100x8")
    card = target.card
    assert target.link_bandwidth(range(8)) == card.link
    assert target.link_bandwidth((8, 15)) == card.link
    assert target.link_bandwidth((7, 8)) == card.network
    assert target.link_bandwidth((0, 1, 2, 8, 9, 10)) == 3 * card.network
    assert target.link_bandwidth((0, 1, 2, 8)) == card.network  # the node with one port is the narrowest
    assert target.link_bandwidth(range(16)) == 8 * card.network < card.link
    network, desktops = gpus.CARDS["rtx4090"].network, gpus.parse("2xrtx4090x4")  # of one port a node
    assert (desktops.link_bandwidth(range(8)), desktops.link_bandwidth((0, 4))) == (network, network / 4)
    assert gpus.parse("l40sx4").link_bandwidth(range(4)) == gpus.CARDS["l40s"].link


def test_every_card_is_whole():
    for card in gpus.CARDS.values():
        assert card.peak.keys() >= {"bf16", "tf32", "fp32", "int8"}
        if gpus.multiplies_bf16(card.capability):
            assert card.peak["bf16"] > card.peak["tf32"] >= card.peak["fp32"], card.name
        else:
            assert card.peak["bf16"] == card.peak["tf32"] == card.peak["fp32"], card.name
        assert card.peak["int8"] >= 1.99 * card.peak["bf16"], card.name
        assert ("fp8" in card.peak) == (float(card.capability) >= 8.9), card.name
        assert card.link > card.network > 0
        assert f"device_memory_size: {card.memory_bytes}" in card.proto and card.model in card.proto


@pytest.mark.parametrize(
    ("asked", "capability", "told"),
    [
        (["bf16"], "9.0", "bf16"),
        (["bf16", "fp32"], "8.0", "bf16; fp32 values, multiplied in tf32"),
        (["fp32"], "7.0", "fp32"),
        (["bf16"], "7.0", "bf16 values, multiplied in fp32; compute capability 7.0 has no bf16 units"),
        (["bf16"], "", "bf16"),
    ],
)
def test_precision_is_what_the_card_multiplies_in(asked, capability, told):
    assert gpus.describe_precision(asked, capability).startswith(told)


def live(capability: str, cores: int, limit: float | None, kind: str = "NVIDIA V100"):
    """A device as CUDA's runtime reports it, under a name that says another card."""
    stats = None if limit is None else {"bytes_limit": int(limit)}
    words = {"platform": "gpu", "device_kind": kind, "memory_stats": lambda: stats}
    return SimpleNamespace(compute_capability=capability, core_count=cores, **words)


@pytest.mark.parametrize("name", list(gpus.CARDS))
def test_live_device_is_its_card_whatever_its_name(name, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    card = gpus.CARDS[name]
    assert gpus.of_device(live(card.capability, card.cores, 0.75 * card.memory_bytes)) == card
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert gpus.of_device(live(card.capability, card.cores, 0.9 * card.memory_bytes)) == card
    assert gpus.of_device(live(card.capability, card.cores - 2, 0.9 * card.memory_bytes)) is None


def test_device_that_is_no_known_card_is_none(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1")
    assert gpus.of_device(live("9.0", 132, 101e9)) is None  # GH200: a Hopper with 96 GB
    assert gpus.of_device(live("8.0", 108, None)) is None  # either A100: memory would decide
    assert gpus.of_device(live("10.0", 148, None)) == gpus.CARDS["b200"]
    assert gpus.of_device(jax.devices("cpu")[0]) is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100 80GB PCIe", "a100_80"),
        ("NVIDIA A100-PCIE-40GB", "a100_40"),
        ("NVIDIA L40", "l40s"),
        ("NVIDIA RTX 6000 Ada Generation", "l40s"),
        ("Tesla V100-PCIE-16GB", "v100_16"),
        ("NVIDIA H200 NVL", "h200"),
    ],
)
def test_board_of_another_speed_with_a_listed_cards_chip_and_memory_is_none(kind, name, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1")
    card = gpus.CARDS[name]
    reported = card.capability, card.cores, card.memory_bytes
    assert gpus.of_device(live(*reported, kind=kind)) is None
    assert gpus.of_device(live(*reported, kind=card.model)) == card


def test_devices_of_two_kinds_are_no_card_and_both_are_named(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1")
    large, small = live("8.0", 108, 85.1e9, "A100 80GB"), live("8.0", 108, 42.3e9, "A100 40GB")
    for devices, card, told in (
        ([large, large], gpus.CARDS["a100_80"], "2 x A100 80GB, 85.1 GB each, "),
        ([large, small], None, "2 x A100 80GB / A100 40GB, 42.3 GB each or more, "),
    ):
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda devices=devices: devices)
        monkeypatch.setattr(jax, "device_count", lambda: 2)
        assert gpus.of_all_devices() == card
        assert runtime.describe().startswith(told)


def test_absent_plugin_is_named_with_the_command(monkeypatch):
    """conftest hides an installed plugin from this process; a CPU-only environment has none."""
    with pytest.raises(gpus.CompilerAbsent, match="target h100x2.*(not installed.*-r requirements-plan.txt|unused)"):
        gpus.compile_devices(gpus.parse("h100x2"))
    monkeypatch.setattr(gpus, "_is_installed", lambda name: name == "jax-cuda13-plugin")
    with pytest.raises(gpus.CompilerAbsent, match=f"pip install .*jax-cuda13-pjrt=={jax.__version__} nvidia-cuda-nvcc"):
        gpus.compile_devices(gpus.parse("h100x2"))


@pytest.mark.parametrize(
    ("message", "raised"),
    [
        ("INTERNAL: libdevice not found at ./libdevice.10.bc", gpus.CompilerAbsent),
        ("UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink nor", gpus.CompilerAbsent),
        ("INTERNAL: anything else", jax.errors.JaxRuntimeError),
    ],
)
def test_absent_assembler_is_named_and_nothing_else_is_taken_for_it(message, raised, monkeypatch):
    def fail(x):
        raise jax.errors.JaxRuntimeError(message)

    topology = SimpleNamespace(devices=jax.devices("cpu"))
    monkeypatch.setattr(gpus.topologies, "get_topology_desc", lambda **_: topology)
    monkeypatch.setattr(gpus.jnp, "exp", fail)
    with pytest.raises(raised) as caught:
        gpus.compile_devices(gpus.parse("h100x2"))
    assert message.partition(". ")[0] in str(caught.value)
    assert raised is not gpus.CompilerAbsent or "-r requirements-plan.txt" in str(caught.value)


def test_compiling_leaves_the_persistent_cache_as_it_was(tmp_path):
    """In a process of its own, because JAX's cache belongs to the process."""
    code = """
import jax, jax.numpy as jnp
from lw_jax.planning import gpus
jax.jit(jnp.sin)(1.0)
gpus.compile_lowered(jax.jit(jnp.tan).lower(1.0))
jax.jit(jnp.cosh).lower(1.0).compile()
"""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    # The options are CUDA's, but any JAX knows them.
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=120)
    kept = " ".join(path.name for path in tmp_path.iterdir())
    assert "jit_sin" in kept and "jit_cosh" in kept and "jit_tan" not in kept


@pytest.mark.slow
def test_every_card_can_be_compiled_for_without_one():
    code = """
import json
from lw_jax.planning import gpus
found = {n: gpus.compile_devices(gpus.parse(f"2x{n}x3")) for n in gpus.CARDS}
print(json.dumps({n: [(d.compute_capability, d.core_count, d.process_index) for d in ds] for n, ds in found.items()}))
"""
    (found,) = commands.compile_for_absent_gpus(code)
    for name, card in gpus.CARDS.items():
        assert found[name] == [[card.capability, card.cores, host] for host in (0, 0, 0, 1, 1, 1)]
