"""LatentWire JAX: a text is written once as a few latents, and frozen language models read them.

Functions are imported on first use: `run.py --help` must not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lw_jax.core import environment
from lw_jax.core.version import __version__

if TYPE_CHECKING:
    from lw_jax.inference.evaluation import evaluate
    from lw_jax.inference.language_model import load_lm
    from lw_jax.inference.trained_wire import load_wire

__all__ = ["__version__", "evaluate", "load_lm", "load_wire"]

_MODULES = {"evaluate": "evaluation", "load_lm": "language_model", "load_wire": "trained_wire"}  # of lw_jax.inference


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    environment.hide_idle_cuda()  # before anything imports JAX
    return getattr(importlib.import_module(f"lw_jax.inference.{_MODULES[name]}"), name)
