"""Dtypes of a model's arithmetic, by configuration, platform and processor."""

import functools
import platform as machine
from pathlib import Path
from typing import NamedTuple

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # configuration -> numpy

# Flags of /proc/cpuinfo with which products of bf16 factors are faster than fp32's, and the name shown to people.
BF16_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}


class Precision(NamedTuple):
    """Dtypes of a model's arithmetic, as numpy names them.

    On a GPU both are the same. A CPU has fast products of bf16 factors, but only with sums and results in fp32, and no
    fast bf16 otherwise: there the residual stream, norms, softmax and all else stay fp32.
    """

    factors: str  # of products with weights, and of attention's
    values: str  # of everything else


FP32 = Precision("float32", "float32")


def resolve(dtype: str, platform: str) -> str:
    """Returns "fp32" or "bf16" for the configuration's `compute.dtype` ("auto": bf16 on a CPU made for it)."""
    if dtype != "auto":
        return dtype
    return "bf16" if platform == "cpu" and bf16_instructions() else "fp32"


def of(dtype: str, platform: str) -> Precision:
    """Returns the precision of encoder, adapters and a trained language model under `compute.dtype`."""
    name = DTYPES[resolve(dtype, platform)]
    return Precision(name, "float32" if platform == "cpu" else name)


def of_reader(weights: str, dtype: str, platform: str) -> Precision:
    """Returns the precision of a frozen reader under its `weights` and `compute.dtype`.

    On a GPU floats are multiplied as they are stored. On a CPU `compute.dtype` is of all products, and the weights
    that are only multiplied are stored as their products take them.
    """
    if platform == "cpu":
        return of("bf16" if weights == "bf16" else dtype, platform)
    return of(weights if weights in DTYPES else dtype, platform)


@functools.cache
def bf16_instructions() -> str:
    """Returns the name of this processor's fastest bf16 products; empty where it has none or does not say."""
    info = Path("/proc/cpuinfo")
    if machine.machine() != "x86_64" or not info.exists():
        return ""
    lines = (line for line in info.read_text("utf-8").splitlines() if line.startswith("flags"))
    flags = next(lines, "").split()
    return next((name for flag, name in BF16_INSTRUCTIONS.items() if flag in flags), "")
