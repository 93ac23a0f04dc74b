"""The processor of this machine: cores at this process's disposal, and instructions for products of matrices."""

import functools
import os
import re
from pathlib import Path

# Words of the kernel's list and the name people know them by; the first that is there is told.
_KNOWN = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
}


def cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def instructions(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the kernel's words for the processor's instructions, as "amx_bf16"; none where it does not tell."""
    try:
        text = file.read_text("utf-8")
    except OSError:  # no Linux
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def describe() -> str:
    """Returns cores and best instructions, as "2-core CPU (AMX)"."""
    best = next((name for word, name in _KNOWN.items() if word in instructions()), "")
    return f"{cores()}-core CPU" + (f" ({best})" if best else "")
