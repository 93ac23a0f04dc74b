"""The processor of this machine, for people."""

import os

from lw_jax.core import precision


def cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> str:
    """Returns cores and instructions for bf16 products, as "2-core CPU (AMX)"."""
    instructions = precision.bf16_instructions()
    return f"{cores()}-core CPU" + (f" ({instructions})" if instructions else "")
