"""LatentWire JAX: a text is written once as a few latents, and frozen language models read them.

`load_lm` and `load_wire` are imported on first use: `run.py --help` must not wait for JAX.
"""

from typing import TYPE_CHECKING, Any

from lw_jax.core.version import __version__

if TYPE_CHECKING:
    from lw_jax.inference.language_model import load_lm
    from lw_jax.inference.trained_wire import load_wire

__all__ = ["__version__", "load_lm", "load_wire"]


def __getattr__(name: str) -> Any:
    if name == "load_wire":
        from lw_jax.inference import trained_wire

        return trained_wire.load_wire
    if name == "load_lm":
        from lw_jax.inference import language_model

        return language_model.load_lm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
