"""Every test runs offline, on eight virtual CPU devices, with JAX's strict promotion rules, or is skipped visibly.

All of it is set by environment variables, so that processes which tests start inherit it.
"""

import gc
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  what the hook names must be there
from lw_jax.core import environment

ROOT = Path(__file__).resolve().parent.parent

assert "jax" not in sys.modules, "JAX was imported before its settings"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("LW_JAX_PROGRESS_SECONDS", "1e6")  # standard error is the same however slow the machine is
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-tests"))
# The limit of the instructions makes compute.dtype=auto fp32 on every processor.
_FLAGS = "--xla_cpu_max_isa=AVX512"
# XLA's older emitters compile a training step in a third of the time and compute the same sums, and a program in one
# part in 0.9 of it; jaxlib 0.11 has the emitters no longer, and ends every process that names them.
if metadata.version("jaxlib").startswith("0.10."):
    _FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ |= {
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # lines of source in each program take a tenth of the time of compiling it
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",  # halves compilation; `@pytest.mark.optimized` turns them on
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "TOKENIZERS_PARALLELISM": "false",
}
if "LW_JAX_TEST_NETWORK" not in os.environ:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PIP_NO_INDEX": "1"}
environment.hide_idle_cuda()

# Shapes and dtypes in the annotations of the models are checked in every call that a test makes.
install_import_hook("lw_jax.models", "tests.typecheck.check")

# Compiled programs of several files; above it they are freed.
PROGRAM_BYTES = 3e9

_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
_connect = socket.socket.connect


def _connect_locally(self: socket.socket, address: Any) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in _LOCAL:
        self.close()
        pytest.fail(f"a test tried to reach {address}; mark it `network` or keep it local")
    _connect(self, address)


def pytest_collection_finish() -> None:
    """Lets Python's collector leave alone what was imported: it took a tenth of the time of tracing."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("LW_JAX_TESTS_UNTIL", "inf")):
        pytest.skip("not begun in the time that this run has: make slow")
    if item.get_closest_marker("gpu") and "cuda" not in os.environ["JAX_PLATFORMS"]:
        pytest.skip("needs an NVIDIA GPU: JAX_PLATFORMS=cuda,cpu")
    if item.get_closest_marker("network") and "LW_JAX_TEST_NETWORK" not in os.environ:
        pytest.skip("needs the internet: LW_JAX_TEST_NETWORK=1")


@pytest.fixture(autouse=True, scope="session")
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("LW_JAX_CACHE", str(tmp_path_factory.mktemp("lw_jax_cache")))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))  # without this machine's cluster profile
    os.environ.pop("LW_JAX_SITE", None)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the two tiny readers, which `tests.tiny` writes there once; some files have another."""
    return tmp_path_factory.getbasetemp() / "readers"


@pytest.fixture(autouse=True, scope="module")
def _forgotten_programs() -> Iterator[None]:
    """Frees compiled programs where the process takes much: those of the whole suite would take several GB."""
    yield
    statm = Path("/proc/self/statm")  # Linux alone has it; elsewhere each file's programs are freed at its end
    pages = int(statm.read_text().split()[1]) if statm.exists() else PROGRAM_BYTES
    if "jax" in sys.modules and pages * resource.getpagesize() > PROGRAM_BYTES:
        sys.modules["jax"].clear_caches()


@pytest.fixture(autouse=True)
def _offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("network"):
        monkeypatch.setattr(socket.socket, "connect", _connect_locally)


@pytest.fixture(autouse=True)
def _optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.node.get_closest_marker("optimized"):
        yield
        return
    import jax

    from tests import tiny

    if "root" in request.fixturenames:  # drawing them with optimizations takes a minute
        tiny.readers(request.getfixturevalue("root"))
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
