"""Ordered (regex, value) tables over tree paths, for shardings and for optimizer masks.

A table is total (every leaf matches a row) and live (every row decides a leaf): a renamed parameter is an error, never
a silent default.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.errors import PlacementError

Value = TypeVar("Value")
Table = Sequence[tuple[str, Value]]

# In messages: how many leaves, and axis sizes up to which number, are listed.
SHOWN = 5
LARGEST_AXIS = 16


def path_of(key_path: Sequence[Any]) -> str:
    """Returns a key path of `jax.tree_util` as "layers/q"."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator="/")


def match(table: Table[Value], tree: Any, *, name: str) -> Any:
    """Returns the tree with each leaf replaced by the value of the first row whose regex matches its whole path.

    `match([(r".*/kernel", 1), (r".*", 0)], tree, name="decay")`. Raises PlacementError for a leaf that no row covers
    and for a row that decides no leaf; `name` names the table in the message.
    """
    return jax.tree.map(lambda row: table[row][1], _match_rows(table, tree, name=name))


def shardings(table: Table[Any], abstract_tree: Any, mesh: Mesh, *, name: str) -> Any:
    """Returns a tree of NamedSharding for leaves that have a shape.

    A value is a PartitionSpec, or a tuple of them of which the first that divides is taken. Raises PlacementError
    where none divides, and as `match` does.
    """
    rows = _match_rows(table, abstract_tree, name=name)

    def place(key_path: Any, leaf: Any, row: int) -> NamedSharding:
        pattern, value = table[row]
        specs = (value,) if isinstance(value, PartitionSpec) else tuple(value)
        obstacles = []
        for spec in specs:
            obstacle = _find_obstacle(spec, leaf.shape, mesh)
            if obstacle is None:
                return NamedSharding(mesh, spec)
            obstacles.append(obstacle)
        raise PlacementError(
            f"{name}: {path_of(key_path)} {tuple(leaf.shape)}: {'; '.join(obstacles)}; row {row + 1} {pattern!r}; "
            "choose another size of the axis or another placement"
        )

    return jax.tree_util.tree_map_with_path(place, abstract_tree, rows)


def _match_rows(table: Table[Any], tree: Any, *, name: str) -> Any:
    patterns = [re.compile(pattern) for pattern, _ in table]
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    rows, uncovered = [], []
    for key_path, leaf in leaves:
        path = path_of(key_path)
        row = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(path)), None)
        if row is None:
            uncovered.append(f"{path} {tuple(getattr(leaf, 'shape', ()))}")
        rows.append(row)
    if uncovered:
        more = f" and {len(uncovered) - SHOWN} more" if len(uncovered) > SHOWN else ""
        raise PlacementError(f"{name}: no row covers {', '.join(uncovered[:SHOWN])}{more}; add a row to the table")
    dead = [f"row {i + 1} {pattern!r}" for i, (pattern, _) in enumerate(table) if i not in rows]
    if dead:
        raise PlacementError(
            f"{name}: {', '.join(dead)} decides none of {len(leaves)} leaves; remove it, or move it before the row "
            "that takes its leaves"
        )
    return jax.tree_util.tree_unflatten(treedef, rows)


def _find_obstacle(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> str | None:
    if len(spec) > len(shape):
        return f"{spec} names {len(spec)} dims of {len(shape)}"
    for dim, entry in enumerate(spec):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        size = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % size:
            named = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            legal = [str(n) for n in range(1, LARGEST_AXIS + 1) if shape[dim] % n == 0]
            return f"dim {dim} ({shape[dim]}) does not divide mesh axis {named} (sizes that do: {', '.join(legal)})"
    return None
