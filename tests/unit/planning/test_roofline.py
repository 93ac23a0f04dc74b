"""Seconds from counts, against the same arithmetic by hand."""

import pytest

from lw_jax.planning import gpus, roofline
from lw_jax.planning.hlo_counts import Collective, Kernel, Program

EXACT = 1e-12  # relative: a handful of fp64 operations
H100 = gpus.parse("h100x8")
CARD = H100.card
COMPUTE = CARD.peak["bf16"] * roofline.MATMUL_FRACTION
MEMORY = CARD.bandwidth * roofline.BANDWIDTH_FRACTION


def matmul(m: int, k: int, n: int, *, arithmetic: str = "bf16", executed: int = 1) -> Kernel:
    width = 4 if arithmetic in ("tf32", "fp32") else 2
    return Kernel(arithmetic, 2 * m * k * n, width * (m * k + k * n + m * n), executed)


def predict(*kernels: Kernel, collectives: tuple[Collective, ...] = (), target=H100):
    return roofline.predict(Program(kernels, collectives), target)


def test_product_of_few_rows_takes_the_reading_of_its_weights():
    found = predict(matmul(8, 4096, 14336, executed=3))
    assert found.gemm == pytest.approx(3 * 2 * (8 * 4096 + 4096 * 14336 + 8 * 14336) / MEMORY, rel=EXACT)
    assert found.gemm > 10 * 3 * 2 * 8 * 4096 * 14336 / COMPUTE


def test_no_kernel_is_shorter_than_a_launch():
    found = predict(Kernel("", 0, 4, 1000), matmul(2, 3, 5, executed=10))
    assert found.memory == pytest.approx(1000 * roofline.KERNEL_SECONDS, rel=EXACT)
    assert found.gemm == pytest.approx(10 * roofline.KERNEL_SECONDS, rel=EXACT)


def test_large_products_take_their_arithmetic_other_kernels_their_traffic_and_all_is_added():
    reduce = Collective("all-reduce", (tuple(range(8)),), 1_600_000, 2_800_000, 5)
    found = predict(matmul(4096, 4096, 8192, executed=7), Kernel("", 0, 10**9, 3), collectives=(reduce,))
    assert found.gemm == pytest.approx(7 * 2 * 4096 * 4096 * 8192 / COMPUTE, rel=EXACT)
    assert found.memory == pytest.approx(3 * 10**9 / MEMORY, rel=EXACT)
    wire = 14_000_000 / (CARD.link * roofline.LINK_FRACTION)
    assert found.collective == pytest.approx(wire + 5 * roofline.COLLECTIVE_SECONDS, rel=EXACT)
    assert found.total == pytest.approx(found.gemm + found.memory + found.collective, rel=EXACT)


def test_each_product_runs_at_the_peak_of_its_own_arithmetic():
    size = (4096, 4096, 8192)
    times = {name: predict(matmul(*size, arithmetic=name)).gemm for name in (*CARD.peak, "other")}
    for name in CARD.peak:
        assert times[name] * CARD.peak[name] == pytest.approx(times["bf16"] * CARD.peak["bf16"], rel=EXACT)
    assert times["other"] == times["fp32"]


def test_arithmetic_that_a_card_lacks_counts_as_the_next_one():
    a100 = gpus.parse("a100_40x1")
    times = [predict(matmul(4096, 4096, 8192, arithmetic=name), target=a100).gemm for name in ("fp8", "bf16")]
    assert times[0] == times[1]


def test_collective_between_nodes_takes_the_network():
    nodes = gpus.parse("2xh100x8")

    def seconds(*groups):
        return predict(
            collectives=(Collective("all-gather", groups, 5 * 10**8, 5 * 10**8, 2),), target=nodes
        ).collective

    network = 10**9 / (CARD.network * roofline.LINK_FRACTION) + 2 * roofline.NETWORK_SECONDS
    inside = 10**9 / (CARD.link * roofline.LINK_FRACTION) + 2 * roofline.COLLECTIVE_SECONDS
    assert seconds(tuple(range(8)), tuple(range(8, 16))) == pytest.approx(inside, rel=EXACT)
    assert seconds(*((i, i + 8) for i in range(8))) == pytest.approx(network, rel=EXACT)
    assert seconds((0, 1), (7, 8)) == pytest.approx(network, rel=EXACT)  # the slowest group decides
    assert inside < seconds(tuple(range(16))) < network  # eight ports a node


def test_collective_within_one_device_sends_nothing():
    alone = Collective("all-reduce", ((0,), (1,)), 10**9, 0, 3)
    assert predict(collectives=(alone,)).collective == pytest.approx(3 * roofline.KERNEL_SECONDS, rel=EXACT)


def test_faster_card_is_predicted_faster():
    work = (matmul(4096, 4096, 8192, executed=9), Kernel("", 0, 10**9, 9))
    total = {name: predict(*work, target=gpus.parse(name)).total for name in gpus.CARDS}
    assert total["b200"] < total["h200"] < total["h100"] < total["a100_80"] < total["a100_40"] < total["rtx4090"]
    assert predict(*work, target=gpus.parse("h200x1")).gemm == predict(*work).gemm  # equal but for memory
