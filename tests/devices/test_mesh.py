"""sharding/mesh.py: every number of devices gets a mesh, or a refusal that names the legal ones."""

import jax
import pytest
from jax.sharding import AxisType

from sharding import mesh as meshes
from sharding.errors import PlacementError


def sizes(count: int, **axes: int) -> dict[str, int]:
    return dict(meshes.make(devices=jax.devices()[:count], **axes).shape)


@pytest.mark.parametrize(
    ("count", "axes", "wanted"),
    [
        (7, {}, (7, 1)),
        (8, {"model": 2}, (4, 2)),
        (4, {"model": 4}, (1, 4)),
        (6, {"data": 3, "model": 2}, (3, 2)),
    ],
)
def test_minus_one_fills_with_the_devices_that_remain(count, axes, wanted):
    assert tuple(sizes(count, **axes).values()) == wanted


def test_axes_are_auto_and_neighbours_lie_along_model():
    mesh = meshes.make(model=2)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.shape == (4, 2)
    assert [device.id for device in mesh.devices[1]] == [2, 3]


@pytest.mark.parametrize(
    ("count", "axes", "words"),
    [
        (3, {"model": 2}, r"data=-1 model=2 on 3 devices: 2 does not divide 3; use data=3 model=1, data=1 model=3"),
        (4, {"data": 4, "model": 2}, "needs 8 devices; use data=4 model=1, data=2 model=2, data=1 model=4"),
        (2, {"model": 4}, "4 does not divide 2"),
        (2, {"data": 0}, "at least 1"),
    ],
)
def test_impossible_mesh_is_refused_with_the_legal_choices(count, axes, words):
    with pytest.raises(PlacementError, match=words):
        sizes(count, **axes)


class Gpu:
    """A stand-in for a GPU of one of several nodes: XLA takes each node for a slice, and numbers GPUs as it likes."""

    def __init__(self, number):
        self.process_index = self.slice_index = number // 2
        self.id, self.platform, self.device_kind = 3 - number, "gpu", "a card"


TWO_NODES = [Gpu(number) for number in range(4)]  # which one test process cannot have


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"model": 4}, "model=4 over processes of 2 devices.*use a divisor of 2"),
        ({"data": 2}, "2 of 4 devices over 2 processes"),
    ],
)
def test_mesh_that_processes_cannot_share_is_refused(axes, words):
    with pytest.raises(PlacementError, match=words):
        meshes.make(devices=TWO_NODES, **axes)


def test_gpus_of_several_nodes_form_a_mesh_in_the_order_of_processes():
    mesh = meshes.make(model=2, devices=TWO_NODES)
    assert mesh.devices.tolist() == [TWO_NODES[:2], TWO_NODES[2:]], "the model axis stays inside a node"
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
