import os
import subprocess
import sys
from pathlib import Path

import pytest

from lw_jax.core import environment

PROJECT = Path(__file__).resolve().parent.parent.parent
WITHOUT_DRIVER = not any(Path(file).exists() for file in environment.DRIVER_FILES)


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


def test_plugin_that_is_asked_for_stays() -> None:
    code = "import sys; from lw_jax.core import environment; environment.hide_idle_cuda(); print(%s)"
    code %= "any('xla_cuda' in name for name in sys.modules)"
    assert _run(code, JAX_PLATFORMS="cuda").stdout == "False\n"


def test_plugin_with_a_driver_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "DRIVER_FILES", (str(tmp_path),))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    before = dict(sys.modules)
    environment.hide_idle_cuda()
    assert sys.modules == before


def test_programs_elsewhere_get_the_user_s_own_environment(monkeypatch):
    monkeypatch.setattr(environment, "_before", {})
    monkeypatch.setattr(environment, "_start_quietly", lambda: None)
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_CPP_MIN_LOG_LEVEL", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"XLA_CLIENT_MEM_FRACTION": "", "JAX_PLATFORMS": "cuda", "JAX_NUM_CPU_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    environment.reserve_memory()
    environment.prepare_compiler(everywhere=True)
    assert (os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"]) == ("cpu", "3")
    assert environment.of_user() == before


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
