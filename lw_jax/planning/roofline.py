"""Counts of a compiled program -> seconds a step on a target. A prediction to rank plans by, not a measurement.

Every kernel takes the longest of its arithmetic, its memory traffic and the floor of a launch; kernels and collectives
are added up: no overlap is assumed, so whatever XLA hides behind other work makes a step faster than predicted.
"""

import dataclasses
from collections.abc import Mapping

from lw_jax.planning.gpus import Card, Target
from lw_jax.planning.hlo_counts import Collective, Kernel, Program
from lw_jax.training.traced_costs import Costs

# Shares of the data sheets' peaks. Assumed, not measured by this project.
MATMUL_FRACTION = 0.65  # of dense FLOP/s, large cuBLAS products
BANDWIDTH_FRACTION = 0.80  # of device memory bandwidth, streaming kernels
LINK_FRACTION = 0.80  # of NVLink, PCIe or network bandwidth, large messages
# Seconds. Assumed, not measured by this project.
KERNEL_SECONDS = 2e-6  # the shortest kernel with its launch
COLLECTIVE_SECONDS = 20e-6  # a collective inside a node, beside its bytes
NETWORK_SECONDS = 40e-6  # the same between nodes

# Arithmetic that a card has no peak for counts as the next one: fp8 before Hopper runs in bf16; of "other" (fp64,
# wide integers) a training step holds only small products.
_NEXT = {"fp8": "bf16", "other": "fp32"}
# JAX's name of a product's factors -> its arithmetic by default
ARITHMETIC = {"float32": "tf32", "bfloat16": "bf16", "float16": "bf16", "int8": "int8", "float8_e4m3fn": "fp8"}


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds a step on every device of the target."""

    gemm: float  # kernels with matrix products
    memory: float  # all other kernels
    collective: float

    @property
    def total(self) -> float:
        """The sum: nothing is taken to overlap."""
        return self.gemm + self.memory + self.collective

    def __add__(self, other: "Times") -> "Times":
        return Times(self.gemm + other.gemm, self.memory + other.memory, self.collective + other.collective)

    def __mul__(self, runs: float) -> "Times":
        return Times(self.gemm * runs, self.memory * runs, self.collective * runs)


NO_TIME = Times(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Speed:
    """What one device reaches, in FLOP/s and bytes/s."""

    products: Mapping[str, float]  # by JAX's name of their factors
    exact: float  # of fp32 at the highest precision, and of all other factors
    bandwidth: float

    @staticmethod
    def of(card: Card) -> "Speed":
        peaks = {name: _peak(card, word) * MATMUL_FRACTION for name, word in ARITHMETIC.items()}
        return Speed(peaks, card.peak["fp32"] * MATMUL_FRACTION, card.bandwidth * BANDWIDTH_FRACTION)

    def predict(self, costs: Costs) -> Times:
        gemm = 0.0
        for product in costs.products:
            peak = self.products.get(product.dtype, self.exact)
            gemm += product.times * max(product.flops / peak, product.bytes / self.bandwidth)
        return Times(gemm, costs.moved / self.bandwidth, 0.0)


def predict(program: Program, target: Target) -> Times:
    """Returns the seconds of one run of the program; each matrix product runs at the peak of its own arithmetic."""
    matmuls = [kernel for kernel in program.kernels if kernel.flops]
    others = [kernel for kernel in program.kernels if not kernel.flops]
    return Times(
        gemm=sum(seconds_of(kernel, target.card) * kernel.executed for kernel in matmuls),
        memory=sum(seconds_of(kernel, target.card) * kernel.executed for kernel in others),
        collective=sum(_collective_seconds(group, target) * group.executed for group in program.collectives),
    )


def seconds_of(kernel: Kernel, card: Card) -> float:
    seconds = max(kernel.bytes / (card.bandwidth * BANDWIDTH_FRACTION), KERNEL_SECONDS)
    if kernel.flops:
        seconds = max(seconds, kernel.flops / (_peak(card, kernel.arithmetic) * MATMUL_FRACTION))
    return seconds


def _peak(card: Card, arithmetic: str) -> float:
    return card.peak[arithmetic if arithmetic in card.peak else _NEXT[arithmetic]]


def _collective_seconds(collective: Collective, target: Target) -> float:
    """Returns the seconds of one run; the slowest group decides, for all run the same program."""
    if not collective.wire_bytes:  # within one device
        return KERNEL_SECONDS
    bandwidth = min(map(target.link_bandwidth, collective.groups)) * LINK_FRACTION
    crossing = any(map(target.spans_hosts, collective.groups))
    return collective.wire_bytes / bandwidth + (NETWORK_SECONDS if crossing else COLLECTIVE_SECONDS)
