"""LatentWire JAX: a text is written once as a few latents, and frozen language models read them.

`load_lm` and `load_wire` are imported on first use: `run.py --help` must not wait for JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lw_jax.api import load_lm, load_wire

__all__ = ["load_lm", "load_wire"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lw_jax import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
