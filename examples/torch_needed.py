"""Check of the examples that need torch, which the project itself does without."""

import importlib.util

from lw_jax.core.errors import UserError


def check() -> None:
    """Raises UserError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed, and this example needs it: pip install torch (a build for CPUs does)")
