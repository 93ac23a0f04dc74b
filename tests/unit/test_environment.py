import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lw_jax.core import environment

PROJECT = Path(__file__).resolve().parent.parent.parent
WITHOUT_DRIVER = not any(Path(file).exists() for file in environment.DRIVER_FILES)
# conftest.py has hidden it from this process, which leaves its name behind.
WITH_PLUGIN = "jax_cuda12_plugin" in sys.modules or importlib.util.find_spec("jax_cuda12_plugin") is not None


def _run(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")} | changes
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=PROJECT, check=False
    )


@pytest.mark.skipif(not WITHOUT_DRIVER, reason="an NVIDIA driver is here")
def test_start_without_a_driver_is_silent_and_on_the_cpu() -> None:
    code = "from lw_jax.core import environment; environment.hide_idle_cuda(); import jax; print(jax.default_backend())"
    done = _run(code)
    assert (done.stdout, done.stderr) == ("cpu\n", "")


@pytest.mark.skipif(not (WITHOUT_DRIVER and WITH_PLUGIN), reason="needs the CUDA plugin, and no NVIDIA driver")
def test_hidden_plugin_is_told_in_one_line() -> None:
    done = _run("from lw_jax.core import environment; print(environment.hide_idle_cuda())")
    assert done.stdout.splitlines() == ["no NVIDIA driver on this machine: JAX's CUDA plugin stays unused"]


def test_plugin_that_is_asked_for_stays() -> None:
    code = (
        "import sys; from lw_jax.core import environment; print(repr(environment.hide_idle_cuda()), len(sys.modules))"
    )
    code = code.replace("len(sys.modules)", "any('xla_cuda' in name for name in sys.modules)")
    assert _run(code, JAX_PLATFORMS="cuda").stdout == "'' False\n"


def test_plugin_with_a_driver_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "DRIVER_FILES", (str(tmp_path),))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert environment.hide_idle_cuda() == ""


def test_memory_is_reserved_unless_the_user_said_how_much(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert environment.memory_fraction() == environment.JAX_FRACTION
    environment.reserve_memory(0.92)
    assert environment.memory_fraction() == 0.92
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    environment.reserve_memory(0.92)
    assert environment.memory_fraction() == 0.6
