"""A step's rows by the device that holds them: what is summed over all rows then crosses devices once a step.

A gradient over rows that lie on n devices is a sum over devices, and the compiler takes it where the gradient arises:
with every micro-batch, in the precision of the product. Here the rows are n shards [n b/n ...], each shard's sums are
taken apart [n ...], and only their total over a whole step is summed over devices, in the precision of the sums.
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
    """The rows of one mesh by their position on its data axis."""

    def __init__(self, mesh: Mesh, *, apart: bool = True):
        """Takes one shard for each position on the data axis; not `apart`: all rows are one, and nothing is changed."""
        self.mesh = mesh
        self.count = mesh.shape["data"] if apart else 1

    @property
    def spec(self) -> PartitionSpec:
        """Returns how an array with an axis of shards lies."""
        return PartitionSpec("data") if self.count > 1 else PartitionSpec()

    def split(self, tree: Any, *, dim: int = 0) -> Any:
        """Returns leaves [... b ...] as [... n b/n ...]; b is dimension `dim` and lies over data, so nothing moves."""
        if self.count == 1:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec(*[None] * dim, "data"))

        def cut(x: jax.Array) -> jax.Array:
            x = x.reshape(*x.shape[:dim], self.count, x.shape[dim] // self.count, *x.shape[dim + 1 :])
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(cut, tree)

    def join(self, tree: Any) -> Any:
        """Returns leaves [n b/n ...] as [b ...], b over data."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda x: self._hold(x.reshape(-1, *x.shape[2:])), tree)

    def map(self, function: Callable, in_axes: Any = 0) -> Callable:
        """Returns `function` over every shard's own arguments; its results [n ...] lie where their shard does.

        `in_axes` as in `jax.vmap`: None for what all shards share.
        """
        if self.count == 1:
            return function

        def one(*args: Any) -> Any:
            token = _in_shard.set(True)
            try:
                return function(*args)
            finally:
                _in_shard.reset(token)

        mapped = jax.vmap(one, in_axes=in_axes, spmd_axis_name="data")
        return lambda *args: jax.tree.map(self._hold, mapped(*args))

    def sum(self, tree: Any) -> Any:
        """Returns the sums [...] of leaves [n ...], whole on every device: one exchange, in each leaf's own dtype."""
        if self.count == 1:
            return tree
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(jnp.sum(x, axis=0), whole), tree)

    def _hold(self, x: jax.Array) -> jax.Array:
        """Keeps the first axis over data and leaves the others to the compiler."""
        free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("data", *free)))


def row_devices(mesh: Mesh) -> int:
    """Returns over how many devices the rows lie that a function is traced for: one inside `Shards.map`."""
    return 1 if _in_shard.get() else mesh.shape["data"]


def keep_rows(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns what holds an array's leading axis split over data inside a jitted program, or a shard on its device."""

    def keep(x: jax.Array) -> jax.Array:
        spec = PartitionSpec() if _in_shard.get() else PartitionSpec("data")  # `vmap` adds the axis of shards
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return keep
