"""Keeps JAX quiet where the CUDA plugin is installed and no NVIDIA driver is; must run before JAX chooses a backend.

JAX initialises every installed plugin whatever `JAX_PLATFORMS` says, and CUDA's then prints a traceback and log lines
from C++ that no setting turns off. The planner needs the plugin as a compiler on machines without a GPU.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

# The device files by which jax._src.hardware_utils tells an NVIDIA GPU: bare metal, containers, WSL2.
DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
_PLUGINS = ("xla_cuda12", "xla_cuda13")


def hide_idle_cuda() -> str:
    """Hides an installed CUDA plugin from this process when no driver is there; returns the line to tell, or nothing.

    Whoever names CUDA in JAX_PLATFORMS gets JAX's own error.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if "cuda" in wanted or "gpu" in wanted or any(Path(file).exists() for file in DRIVER_FILES):
        return ""
    if importlib.util.find_spec("jax_plugins") is None:
        return ""
    names = [f"jax_plugins.{name}" for name in _PLUGINS if importlib.util.find_spec(f"jax_plugins.{name}")]
    for name in names:
        idle = types.ModuleType(name, "Stands in for a CUDA plugin that has no driver.")
        idle.__dict__["initialize"] = lambda: None
        sys.modules[name] = idle
    return "no NVIDIA driver on this machine: JAX's CUDA plugin stays unused" if names else ""
