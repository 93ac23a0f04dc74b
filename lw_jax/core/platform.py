"""Keeps JAX quiet where its CUDA plugin is installed and no NVIDIA driver is; must run before JAX is imported.

JAX loads every installed plugin whatever `JAX_PLATFORMS` says, and CUDA's then prints a traceback, and log lines from
C++ that no setting turns off. The planner needs the plugin as a compiler on machines without a GPU.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

# The device files by which jax._src.hardware_utils tells an NVIDIA GPU: bare metal, containers, WSL2.
DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def hide_idle_cuda() -> str:
    """Hides an installed CUDA plugin from this process when no driver is there; returns the line to tell, or nothing.

    Whoever names CUDA in JAX_PLATFORMS gets JAX's own error.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if "cuda" in wanted or "gpu" in wanted or any(Path(file).exists() for file in DRIVER_FILES):
        return ""
    modules: dict[str, Any] = sys.modules
    hidden = False
    for version in (12, 13):
        extensions, plugin = f"jax_cuda{version}_plugin", f"jax_plugins.xla_cuda{version}"
        if importlib.util.find_spec(extensions):
            hidden = True
            modules[extensions] = None  # Python's own mark for a module that is not to be found
            modules[plugin] = types.ModuleType(plugin, "Stands in for a CUDA plugin that has no driver.")
            modules[plugin].initialize = lambda: None  # what JAX calls
    return "no NVIDIA driver on this machine: JAX's CUDA plugin stays unused" if hidden else ""
