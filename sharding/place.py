"""Global arrays from host batches; bytes of a placed tree per device."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.errors import PlacementError
from sharding.placement import Placement
from sharding.rules import path_of

# Legal values named in a refusal.
CHOICES = 3


def accumulation(*, global_batch: int, micro_batch: int, data_axis: int) -> int:
    """Returns the micro-batches of one optimizer step: global = result x micro_batch x data_axis.

    `micro_batch` counts examples on one device; 0 takes the device's whole share. Raises PlacementError with the
    nearest legal values.
    """
    if global_batch < 1 or micro_batch < 0 or data_axis < 1:
        raise PlacementError(
            f"global_batch={global_batch} micro_batch={micro_batch} data={data_axis}: the global batch and the data "
            "axis are at least 1, the micro-batch at least 0 (0: the whole share)"
        )
    asked = f"train.global_batch={global_batch} train.micro_batch={micro_batch} on mesh data={data_axis}"
    share, rest = divmod(global_batch, data_axis)
    if rest:
        unit = data_axis * max(micro_batch, 1)
        nearest = _nearest(global_batch, (unit * n for n in range(1, global_batch // unit + CHOICES + 1)))
        raise PlacementError(f"{asked}: the data axis does not divide the global batch; use global_batch {nearest}")
    micro = micro_batch or share
    if share % micro:
        nearest = _nearest(micro, (n for n in range(1, share + 1) if share % n == 0))
        raise PlacementError(f"{asked}: a device's share is {share} examples; use micro_batch {nearest}")
    return share // micro


def put_batch(batch: Any, mesh: Mesh, *, accumulation: int) -> Any:
    """Returns this process's [b ...] arrays as global [a, B/a ...] arrays, examples split over data.

    B is b x processes. Each process splits its examples into `a` consecutive runs; run i of all processes together is
    micro-batch i. The micro-batch of an example depends on the number of processes; the global batch, and every sum
    over the step, does not.
    """

    def cut(key_path: Any, leaf: np.ndarray) -> np.ndarray:
        if leaf.shape[0] % accumulation:
            raise PlacementError(
                f"batch/{path_of(key_path)} {leaf.shape}: {leaf.shape[0]} examples do not divide into "
                f"{accumulation} micro-batches; derive both with sharding.place.accumulation"
            )
        return leaf.reshape(accumulation, leaf.shape[0] // accumulation, *leaf.shape[1:])

    return _put(jax.tree_util.tree_map_with_path(cut, batch), mesh, dim=1)


def put_eval(batch: Any, mesh: Mesh) -> Any:
    """Returns this process's [b ...] arrays as global [B ...] arrays, examples split over data."""
    return _put(batch, mesh, dim=0)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Returns the tree replicated over the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def rows(tree: Any, mesh: Mesh) -> Any:
    """Returns the tree on the mesh, the leading axis of every leaf split over data."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("data")))


def local_rows(tree: Any, mesh: Mesh) -> Any:
    """Returns this process's rows of arrays [B ...] on the mesh, on the host: those that it gave `put_eval`."""

    def own(leaf: jax.Array) -> np.ndarray:
        shards = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])

    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return jax.device_get(tree)
    return jax.tree.map(own, rows(tree, mesh))


def put_parts(batch: Any, placement: Placement, put: Callable[[Any, Mesh], Any]) -> Any:
    """Returns the batch on its meshes: each of batch["readers"] with its reader, the rest with the trainable tree."""
    rest = put({key: value for key, value in batch.items() if key != "readers"}, placement.learner)
    readers = {name: put(fields, placement.readers[name].mesh) for name, fields in batch["readers"].items()}
    return {**rest, "readers": readers}


def place_shapes(shapes: Any, shardings: Any) -> Any:
    """Returns the shapes as ShapeDtypeStructs with shardings, as a restore takes them."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def round_up(batch: int, data: int) -> int:
    """Returns the smallest batch of at least this size that the data axis divides."""
    return -(-batch // data) * data


def device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays or ShapeDtypeStructs on one device (without sharding: all)."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def _put(batch: Any, mesh: Mesh, *, dim: int) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(*([None] * dim), "data"))
    processes = len({device.process_index for device in mesh.devices.flat})

    def put(key_path: Any, leaf: np.ndarray) -> jax.Array:
        shape = (*leaf.shape[:dim], leaf.shape[dim] * processes, *leaf.shape[dim + 1 :])
        if shape[dim] % mesh.shape["data"]:
            raise PlacementError(
                f"batch/{path_of(key_path)} {leaf.shape}: {shape[dim]} examples do not divide over mesh axis "
                f"data={mesh.shape['data']}; choose a batch that is a multiple of it"
            )
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    return jax.tree_util.tree_map_with_path(put, batch)


def _nearest(wanted: int, legal: Any) -> str:
    chosen = sorted(sorted(legal, key=lambda n: (abs(n - wanted), n))[:CHOICES])
    return ", ".join(map(str, chosen[:-1])) + (" or " if len(chosen) > 1 else "") + str(chosen[-1])
