"""Global arrays from host batches; bytes of a placed tree per device."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.errors import PlacementError
from sharding.placement import Placement

ROW_COST = 5  # of a row, where a micro-batch beside its rows costs 1 (kernels' starts, weights read again): assumed


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the examples of an optimizer step lie on a data axis: the last rows are filling, of weight zero.

    A cut is tight: a smaller micro-batch would need more accumulation.
    """

    global_batch: int
    data_axis: int
    accumulation: int

    @property
    def micro_batch(self) -> int:
        return -(-self.global_batch // (self.data_axis * self.accumulation))

    @property
    def rows(self) -> int:
        return self.micro_batch * self.data_axis * self.accumulation

    @property
    def filling(self) -> int:
        return self.rows - self.global_batch

    @property
    def full_batches(self) -> list[int]:
        """Returns the nearest global batches without filling on as many devices: one below, one above."""
        unit = self.data_axis * self.accumulation
        below = self.global_batch // unit * unit
        return [size for size in (below, below + unit) if size]

    @property
    def full_micro_batches(self) -> list[int]:
        """Returns the nearest micro-batches without filling for this global batch; none where a share is uneven."""
        share, remainder = divmod(self.global_batch, self.data_axis)
        sizes = [] if remainder else [size for size in range(1, share + 1) if share % size == 0]
        below = [size for size in sizes if size < self.micro_batch]
        return below[-1:] + [size for size in sizes if size > self.micro_batch][:1]

    def describe(self, *, micro_batch: bool = False) -> str:
        """Returns the rows of weight zero and what has none, or nothing; `micro_batch`: the user has named one."""
        if not self.filling:
            return ""
        other = [f"train.global_batch={' or '.join(map(str, self.full_batches))}"]
        if micro_batch and self.full_micro_batches:
            other.append(f"train.micro_batch={' or '.join(map(str, self.full_micro_batches))}")
        share = f"{self.filling} of {self.rows} rows of a step ({self.filling / self.rows:.1%})"
        return f"{share} are padding rows (weight 0); none with {', or '.join(other)}"


def cut(*, global_batch: int, micro_batch: int, data_axis: int) -> Cut:
    """Returns the cut with the least accumulation and micro-batches of at most `micro_batch` rows of one device.

    0 takes the device's whole share. Raises PlacementError where some device would have no example.
    """
    if global_batch < data_axis:
        raise PlacementError(
            f"train.global_batch={global_batch} on mesh data={data_axis}: some devices would have no example; use "
            f"mesh.data={global_batch}, or global_batch {data_axis} or more"
        )
    share = -(-global_batch // data_axis)
    return Cut(global_batch, data_axis, -(-share // (micro_batch or share)))


def micro_batches(*, global_batch: int, data_axis: int) -> list[int]:
    """Returns the micro-batches worth trying, ascending: each makes the step cheaper than every smaller one.

    Filling costs as much as examples do, and each micro-batch something of its own (`ROW_COST`).
    """
    share, sizes, least = -(-global_batch // data_axis), [], None
    for size in sorted({-(-share // count) for count in range(1, share + 1)}):
        count = -(-share // size)
        cost = count * (size * ROW_COST + 1)
        if least is None or cost < least:
            sizes.append(size)
            least = cost
    return sizes


def spread(global_batch: int, count: int) -> int:
    """Returns the fewest of `count` devices on which no device's share of the batch is larger than on all of them."""
    share = -(-global_batch // count)
    return -(-global_batch // share)


def put_batch(batch: Any, mesh: Mesh, *, accumulation: int) -> Any:
    """Returns this process's [b ...] arrays as global [a, B/a ...] arrays, examples split over data.

    B is b x processes. Each process splits its examples into `a` consecutive runs; run i of all processes together is
    micro-batch i. The micro-batch of an example depends on the number of processes; the global batch, and every sum
    over the step, does not.
    """
    cut = jax.tree.map(lambda leaf: leaf.reshape(accumulation, len(leaf) // accumulation, *leaf.shape[1:]), batch)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(None, "data")), cut)


def put_eval(batch: Any, mesh: Mesh) -> Any:
    """Returns this process's [b ...] arrays as global [B ...] arrays, examples split over data."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), batch)


def whole(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def replicate(tree: Any, mesh: Mesh) -> Any:
    return jax.device_put(tree, whole(mesh))


def put_first(tree: Any, shardings: Any) -> Any:
    """Returns the tree on its shardings; what each process has computed for itself is the first one's for all.

    Processors of several kinds round differently, and `device_put` refuses values that differ in one bit.
    """

    def put(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        values = multihost_utils.broadcast_one_to_all(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, values.__getitem__)

    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(put, tree, shardings)


def rows(tree: Any, mesh: Mesh) -> Any:
    """Returns the tree on the mesh, the leading axis of every leaf split over data."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("data")))


def local_rows(tree: Any, mesh: Mesh) -> Any:
    """Returns this process's rows of arrays [B ...] on the mesh, on the host: those that it gave `put_eval`."""

    def join_shards(leaf: jax.Array) -> np.ndarray:
        shards = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])

    if processes(mesh) == 1:
        return jax.device_get(tree)
    return jax.tree.map(join_shards, rows(tree, mesh))


def put_parts(batch: Any, placement: Placement, put: Callable[[Any, Mesh], Any]) -> Any:
    """Returns the batch on its meshes: each of batch["readers"] with its reader, the rest with the trainable tree."""
    learner_batch = put({key: value for key, value in batch.items() if key != "readers"}, placement.learner)
    readers = {name: put(fields, placement.readers[name].mesh) for name, fields in batch["readers"].items()}
    return {**learner_batch, "readers": readers}


def place_shapes(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def round_up(batch: int, data: int) -> int:
    return -(-batch // data) * data


def processes(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays or ShapeDtypeStructs on one device (without sharding: all)."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
