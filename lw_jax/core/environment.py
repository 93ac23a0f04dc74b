"""Environment setup before `import jax`: share of GPU memory, CUDA plugin on machines without a driver.

JAX loads every installed plugin whatever `JAX_PLATFORMS` is; without a driver the CUDA plugin prints a traceback and
C++ log lines that no setting turns off. The planner needs the plugin as a compiler on machines without a GPU.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

from lw_jax.core.errors import UserError

# Device files by which jax._src.hardware_utils detects an NVIDIA GPU: bare metal, containers, WSL2.
DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


# Both names are read by JAX, the newer one first; without them it takes JAX_FRACTION.
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
JAX_FRACTION = 0.75
FRACTION = 0.92  # of a GPU, for XLA; the rest is for CUDA, NCCL and cuBLAS: chosen, not measured
_LAUNCHERS = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_", "OMPI_")
_before: dict[str, str | None] = {}  # variables that this module has changed -> the user's own values
_NO_DRIVER = (b"Could not find cuda drivers", b"before absl::InitializeLog()")


def reserve_memory() -> None:
    """Raises the share of GPU memory that JAX preallocates to FRACTION.

    The user's own setting takes precedence. With both names set JAX refuses to start: the deprecated one goes.

    Raises:
      UserError: the user's setting is no share; JAX would go on without the GPU.
    """
    new, deprecated = _FRACTIONS
    if os.environ.get(new):
        _change(deprecated, None)
    elif not os.environ.get(deprecated):
        _change(new, str(FRACTION))
    if _has_driver():
        memory_fraction()


def of_job() -> dict[str, str]:
    """Returns the environment for a job that is submitted: the user's own, without that of an allocation around it.

    sbatch hands it to the job. Its own SBATCH_* would replace what the file asks for, and the job's srun reads SLURM_*
    as options; SLURM_CONF says where the cluster is.
    """
    variables = os.environ | _before
    return {
        name: value
        for name, value in variables.items()
        if value is not None and (name == "SLURM_CONF" or not name.startswith(_LAUNCHERS))
    }


def _change(name: str, value: str | None) -> None:
    _before.setdefault(name, os.environ.get(name))
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _set_default(name: str, value: str) -> None:
    if name not in os.environ:
        _change(name, value)


def memory_fraction() -> float:
    """Returns the share of a GPU's memory that JAX's allocator may take, and reports as the device's limit.

    Raises:
      UserError: the variable holds no such number.
    """
    for name in _FRACTIONS:
        if text := os.environ.get(name):
            with contextlib.suppress(ValueError):
                if 0 < (fraction := float(text)) < math.inf:
                    return fraction
            raise UserError(f"{name}={text!r}: a share of a GPU's memory is needed, as 0.9")
    return JAX_FRACTION


def leave_out_torch() -> None:
    """Hides PyTorch from transformers, which would import it (1.6 s) and otherwise warns that it is absent.

    For a process that is this program's alone: nothing in it can import PyTorch afterwards.
    """
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # Python's own mark of a missing module
    _set_default("TRANSFORMERS_VERBOSITY", "error")


def prepare_compiler(*, everywhere: bool) -> None:
    """Prepares ahead-of-time compilation for GPUs of another machine; `everywhere` also on a machine with GPUs.

    Without a CUDA plugin 64 virtual CPU devices (eight nodes of eight) replace the target's.
    """
    if not everywhere and _has_driver():
        return
    _change("JAX_PLATFORMS", "cpu")
    _change("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # which would ask the driver
    _set_default("JAX_NUM_CPU_DEVICES", "64")
    _set_default("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of a step that is too large; the plan reports it
    _start_quietly()


def _start_quietly() -> None:
    """Starts JAX without the CUDA plugin's lines about a missing driver.

    They come from C++, so the file descriptor is redirected; every other line is passed on.
    """
    import tempfile

    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            importlib.import_module("jax").devices()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            for line in captured:
                if not any(known in line for known in _NO_DRIVER):
                    os.write(2, line)


def _has_driver() -> bool:
    return any(Path(file).exists() for file in DRIVER_FILES)


def has_cuda() -> bool:
    """Says whether a driver and JAX's plugin for it are here, so that the devices should be GPUs."""
    return _has_driver() and any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def hide_idle_cuda() -> None:
    """Hides an installed CUDA plugin when there is no driver; `runtime.start_devices` refuses to do without it."""
    if _has_driver():
        return
    modules: dict[str, Any] = sys.modules
    for version in (12, 13):
        extensions, plugin = f"jax_cuda{version}_plugin", f"jax_plugins.xla_cuda{version}"
        if importlib.util.find_spec(extensions):
            modules[extensions] = None  # Python's own mark of a missing module
            modules[plugin] = types.ModuleType(plugin, "Stands in for a CUDA plugin that has no driver.")
            modules[plugin].initialize = lambda: None  # what JAX calls


def idle_libraries() -> bool:
    """Says whether this environment is one for NVIDIA GPUs (requirements.txt) on a machine without their driver."""
    return not _has_driver() and all(importlib.util.find_spec(name) for name in ("nvidia", "nvidia.cudnn"))
