"""LatentWire JAX: a text is written once as a few latents, and frozen language models read them.

`load_lm` and `load_wire` are imported on first use: `run.py --help` must not wait for JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lw_jax.inference.api import load_wire
    from lw_jax.inference.language import load_lm

__all__ = ["load_lm", "load_wire"]


def __getattr__(name: str) -> Any:
    if name == "load_wire":
        from lw_jax.inference import api

        return api.load_wire
    if name == "load_lm":
        from lw_jax.inference import language

        return language.load_lm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
