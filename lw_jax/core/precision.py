"""Dtypes of a model's arithmetic, by configuration, platform and processor."""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # configuration -> numpy

# Flags of /proc/cpuinfo with which products of bf16 factors are faster than fp32's, and the name shown to people.
BF16_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}
# The same instructions within XLA's limits; a lower limit has none of them.
_ISA = {"AVX512_BF16": ("avx512_bf16",), "AMX": tuple(BF16_INSTRUCTIONS), "AMX_FP16": tuple(BF16_INSTRUCTIONS)}


class Precision(NamedTuple):
    """Dtypes of a model's arithmetic, as numpy names them.

    On a GPU both are the same. A CPU has fast products of bf16 factors, but only with sums and results in fp32, and no
    fast bf16 otherwise: there the residual stream, norms, softmax and all else stay fp32.
    """

    factors: str  # of products with weights, and of attention's
    values: str  # of everything else


FP32 = Precision("float32", "float32")


def resolve(dtype: str, platform: str) -> str:
    """Returns "fp32" or "bf16" for the configuration's `compute.dtype` ("auto": fp32 on a CPU not made for bf16)."""
    if dtype != "auto":
        return dtype
    return "fp32" if platform == "cpu" and not bf16_instructions() else "bf16"


def of(dtype: str, platform: str) -> Precision:
    name = DTYPES[resolve(dtype, platform)]
    return Precision(name, "float32" if platform == "cpu" else name)


def of_reader(weights: str, dtype: str, platform: str) -> Precision:
    """Returns the precision of a frozen reader under its `weights` and `compute.dtype`.

    On a GPU floats are multiplied as they are stored. On a CPU `compute.dtype` is of all products but those of a reader
    in bf16, and the weights that are only multiplied are stored as their products take them.
    """
    if platform == "cpu":
        return of("bf16" if weights == "bf16" else dtype, platform)
    return of(weights if weights in DTYPES else dtype, platform)


def describe_cpu(factors: Sequence[str]) -> str:
    if "bfloat16" not in factors:
        return "fp32"
    return f"bf16 factors, fp32 sums and all else ({bf16_instructions() or 'no instructions for it: slow'})"


def bf16_instructions() -> str:
    """Returns the name of this processor's fastest bf16 products; empty where it has none or does not say.

    XLA's own limit, `--xla_cpu_max_isa` in XLA_FLAGS, hides what is beyond it.
    """
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    allowed = _ISA.get(limits[-1].upper(), ()) if limits else BF16_INSTRUCTIONS
    return next((name for flag, name in BF16_INSTRUCTIONS.items() if flag in allowed and flag in _flags()), "")


@functools.cache
def _flags() -> tuple[str, ...]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    return tuple(next((line for line in lines if line.startswith("flags")), "").split())


def cores() -> int:
    """Returns the processor's cores that this process may use: under SLURM those of the job, not of the node."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_processor() -> str:
    instructions = bf16_instructions()
    return f"{cores()}-core CPU" + (f" ({instructions})" if instructions else "")
