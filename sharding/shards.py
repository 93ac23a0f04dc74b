"""Per-shard gradient sums: one all-reduce a step instead of one a micro-batch.

The compiler reduces a data-parallel gradient where it arises: with every micro-batch, in the dtype of the matmul. Here
the rows are n shards [n b/n ...], each with its own sums [n ...]; only their total over the step is reduced over
devices, in the dtype of the sums.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Set while a function is traced for one shard; `vmap` is part of every trace cache's key, so no trace is mixed up.
_in_shard: contextvars.ContextVar[bool] = contextvars.ContextVar("in_shard", default=False)


class Shards:
    """Rows of a batch by their position on the data axis of one mesh."""

    def __init__(self, mesh: Mesh, *, separate: bool = True):
        """Makes one shard per position on the data axis; not `separate`: all rows are one shard, nothing changes."""
        self.mesh = mesh
        self.count = mesh.shape["data"] if separate else 1

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec("data") if self.count > 1 else PartitionSpec()

    def split(self, tree: Any, *, dim: int = 0) -> Any:
        """Returns leaves [... b ...] as [... n b/n ...]; b is dimension `dim` and is split over data: no data moves."""
        if self.count == 1:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec(*[None] * dim, "data"))

        def cut(x: jax.Array) -> jax.Array:
            x = x.reshape(*x.shape[:dim], self.count, x.shape[dim] // self.count, *x.shape[dim + 1 :])
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(cut, tree)

    def join(self, tree: Any) -> Any:
        """Returns leaves [n b/n ...] as [b ...], b split over data."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda x: self._hold(x.reshape(-1, *x.shape[2:])), tree)

    def map(self, function: Callable, in_axes: Any = 0) -> Callable:
        """Returns `function` mapped over the shards; its results [n ...] stay on the devices of their shard.

        `in_axes` as in `jax.vmap`: None for arguments that all shards share.
        """
        if self.count == 1:
            return function

        def per_shard(*args: Any) -> Any:
            token = _in_shard.set(True)
            try:
                return function(*args)
            finally:
                _in_shard.reset(token)

        mapped = jax.vmap(per_shard, in_axes=in_axes, spmd_axis_name="data")
        return lambda *args: jax.tree.map(self._hold, mapped(*args))

    def sum(self, tree: Any) -> Any:
        """Returns the sums [...] of leaves [n ...], replicated: one all-reduce, in each leaf's own dtype."""
        if self.count == 1:
            return tree
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(jnp.sum(x, axis=0), whole), tree)

    def _hold(self, x: jax.Array) -> jax.Array:
        free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("data", *free)))


def row_devices(mesh: Mesh) -> int:
    """Returns the number of devices that the traced rows are split over: one inside `Shards.map`."""
    return 1 if _in_shard.get() else mesh.shape["data"]


def keep_rows(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns a sharding constraint for the leading axis: over data in a jitted program, local inside a shard."""

    def keep(x: jax.Array) -> jax.Array:
        spec = PartitionSpec() if _in_shard.get() else PartitionSpec("data")  # `vmap` adds the axis of shards
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return keep


def by_rows(mesh: Mesh) -> Callable[[Callable], Callable]:
    """Returns what makes a function of rows [b ...] run on each device's own: for a kernel, which XLA cannot split.

    Inside `Shards.map` it runs on the rows of all shards.
    """

    spec = PartitionSpec("data")

    def local(function: Callable) -> Callable:
        split = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        if not _in_shard.get():
            return split
        run = jax.custom_batching.custom_vmap(function)

        @run.def_vmap
        def _of_all_shards(count: int, mapped: Any, *operands: Any) -> tuple[Any, Any]:
            def join(x: jax.Array, is_mapped: bool) -> jax.Array:
                x = x if is_mapped else jnp.broadcast_to(x, (count, *x.shape))
                return x.reshape(-1, *x.shape[2:])

            out = split(*jax.tree.map(join, operands, tuple(mapped)))
            return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), out), jax.tree.map(lambda _: True, out)

        return run

    return local


def keep_heads(mesh: Mesh, *, heads: int, split: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns a sharding constraint for keys or values [l b m k e]: rows over data, heads over model where they divide.

    `split`: the model's own heads lie over the model axis, as in the placement "tensor".
    """
    axis = "model" if split and heads % mesh.shape["model"] == 0 else None

    def keep(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(None, None if _in_shard.get() else "data", None, axis)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return keep
