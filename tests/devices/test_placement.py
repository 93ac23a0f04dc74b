"""sharding/placement.py: a strategy on a number of devices gives meshes, or a refusal that says what would do."""

import jax
import pytest

from sharding import placement
from sharding.errors import PlacementError
from sharding.placement import STRATEGIES, Placement
from tests.devices.test_mesh import TWO_NODES

PAIR = {"llama": 16, "qwen": 15}  # bytes; llama is the larger
TRIO = {"llama": 16, "qwen": 15, "other": 3}
COUNTS = [1, 2, 3, 4, 6, 8]
REFUSED = {
    ("split", 1): "2 readers of model=1 need a multiple of 2 devices; use 2 devices",
    ("split", 3): "need a multiple of 2 devices; use 2 devices",
    ("hybrid3", 1): "'hybrid3' on 1 devices with 2 readers: it needs three devices",
    ("hybrid3", 2): "'hybrid3' on 2 devices with 2 readers: it needs three devices",
    ("hybrid4", 1): "need a multiple of 4 devices; use 4 devices",
    ("hybrid4", 2): "need a multiple of 4 devices; use 4 devices",
    ("hybrid4", 3): "need a multiple of 4 devices; use 4 devices",
    ("hybrid4", 6): "2 readers of model=2 need a multiple of 4 devices; use 4 devices",
}
LEGAL = [(strategy, count) for strategy in STRATEGIES for count in COUNTS if (strategy, count) not in REFUSED]


def put(strategy: str, count: int, readers: dict[str, int] | None = None, **axes: int) -> Placement:
    return placement.place(strategy, readers or PAIR, devices=jax.devices()[:count], **axes)


def ids(mesh: jax.sharding.Mesh) -> list[list[int]]:
    """Device ids by data row; the devices of a row share one reader's weights."""
    return [[device.id for device in row] for row in mesh.devices]


def layout(placed: Placement) -> dict[str, tuple[list[list[int]], str]]:
    return {name: (ids(at.mesh), at.table) for name, at in placed.readers.items()}


@pytest.mark.parametrize(("strategy", "count"), LEGAL)
def test_data_axis_is_the_same_everywhere_and_no_device_is_named_twice(strategy, count):
    placed = put(strategy, count)
    assert placed.strategy == strategy
    assert {mesh.shape["data"] for mesh in placed.meshes} == {placed.data}
    used = [device for mesh in placed.meshes for device in mesh.devices.flat]
    assert len(set(used)) == len(used) == placed.devices <= count
    assert placed.readers.keys() == PAIR.keys()
    assert placed.on_several_meshes == (strategy in ("split", "hybrid3", "hybrid4"))
    assert placed.meshes[0] == placed.learner


@pytest.mark.parametrize("count", COUNTS)
def test_single_takes_the_first_device_however_many_there_are(count):
    placed = put("single", count)
    assert layout(placed) == {"llama": ([[0]], "replicate"), "qwen": ([[0]], "replicate")}
    assert f"{jax.device_count() - 1} of {jax.device_count()} devices" in placed.describe()


LAYOUTS = [
    ("tensor", 3, {"model": 3}, dict.fromkeys(PAIR, ([[0, 1, 2]], "tensor"))),
    ("tensor", 6, {"model": 3}, dict.fromkeys(PAIR, ([[0, 1, 2], [3, 4, 5]], "tensor"))),
    ("tensor", 8, {"data": 1, "model": 8}, dict.fromkeys(PAIR, ([[0, 1, 2, 3, 4, 5, 6, 7]], "tensor"))),
    ("split", 2, {}, {"llama": ([[0]], "replicate"), "qwen": ([[1]], "replicate")}),
    ("split", 6, {}, {"llama": ([[0], [1], [2]], "replicate"), "qwen": ([[3], [4], [5]], "replicate")}),
    ("split", 8, {"model": 2}, {"llama": ([[0, 1], [2, 3]], "tensor"), "qwen": ([[4, 5], [6, 7]], "tensor")}),
    ("split", 8, {"data": 2}, {"llama": ([[0], [1]], "replicate"), "qwen": ([[2], [3]], "replicate")}),
    (
        *("split", 6, {"readers": TRIO}),
        {"llama": ([[0], [1]], "replicate"), "qwen": ([[2], [3]], "replicate"), "other": ([[4], [5]], "replicate")},
    ),
    ("hybrid3", 4, {}, {"llama": ([[0, 1]], "tensor"), "qwen": ([[2]], "replicate")}),
    (
        *("hybrid3", 4, {"readers": {"llama": 15, "qwen": 16}}),
        {"llama": ([[2]], "replicate"), "qwen": ([[0, 1]], "tensor")},
    ),
    ("hybrid4", 4, {}, {"llama": ([[0, 1]], "tensor"), "qwen": ([[2, 3]], "tensor")}),
    ("hybrid4", 8, {}, {"llama": ([[0, 1], [2, 3]], "tensor"), "qwen": ([[4, 5], [6, 7]], "tensor")}),
]


@pytest.mark.parametrize(("strategy", "count", "asked", "wanted"), LAYOUTS)
def test_neighbours_share_a_reader_and_the_larger_one_has_more(strategy, count, asked, wanted):
    placed = put(strategy, count, **asked)
    assert layout(placed) == wanted
    if strategy == "hybrid3":
        larger = max(asked.get("readers", PAIR), key=asked.get("readers", PAIR).__getitem__)
        assert placed.learner == placed.readers[larger].mesh and (placed.devices, placed.data) == (3, 1)


def test_devices_that_a_named_data_axis_leaves_are_told():
    assert put("split", 8, data=2).describe().endswith("on 4 cpu; 4 of 8 devices stay unused")


@pytest.mark.parametrize(("strategy", "count"), REFUSED)
def test_devices_that_a_strategy_cannot_use_are_refused_with_the_number_it_can(strategy, count):
    with pytest.raises(PlacementError, match=REFUSED[strategy, count]) as caught:
        put(strategy, count)
    assert f"mesh.placement='{strategy}' on {count} devices" in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "count", "readers", "axes", "words"),
    [
        ("split", 2, {"llama": 16}, {}, "with 1 readers: it separates readers; use replicate or tensor"),
        ("split", 2, TRIO, {}, "3 readers of model=1 need a multiple of 3 devices; use 3 devices"),
        ("split", 8, PAIR, {"model": 3}, "need a multiple of 6 devices; use 6 devices"),
        ("split", 8, PAIR, {"data": 8}, "need a multiple of 2 devices; use 8 devices"),
        ("hybrid3", 4, TRIO, {}, "'hybrid3' on 4 devices with 3 readers"),
        ("hybrid4", 8, TRIO, {}, "'hybrid4' on 8 devices with 3 readers"),
        ("everywhere", 2, PAIR, {}, "mesh.placement='everywhere' is not one of single, replicate, fsdp, tensor, split"),
        ("auto", 2, PAIR, {}, "'auto' is not one of"),
    ],
)
def test_impossible_wish_is_refused_by_name(strategy, count, readers, axes, words):
    with pytest.raises(PlacementError, match=words):
        put(strategy, count, readers, **axes)


@pytest.mark.parametrize("strategy", ["split", "hybrid3", "hybrid4"])
def test_readers_apart_over_several_processes_are_refused(strategy):
    with pytest.raises(PlacementError, match=rf"'{strategy}' over several processes.*use replicate, fsdp or tensor"):
        placement.place(strategy, PAIR, devices=TWO_NODES)
