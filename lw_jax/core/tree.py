"""Parameter trees by path: listing, sizes, digests."""

import hashlib
import math
from typing import Any

import jax
import numpy as np

from lw_jax.core.types import Tree
from sharding.rules import path_of

__all__ = ["count", "digest", "flatten_paths", "nbytes", "path_of", "table", "unflatten_paths"]


def flatten_paths(tree: Tree) -> dict[str, Any]:
    """Returns {"layers/q": leaf} in the tree's order."""
    return {path_of(key_path): leaf for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten_paths(flat: dict[str, Any]) -> Tree:
    """Returns the nested dict of `flatten_paths` (dicts only: a list comes back as a dict of its numbers).

    Raises ValueError where one path is both a leaf and a folder.
    """
    tree: Tree = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path}: a part of it is a leaf; a path is a leaf or a folder")
        if name in node:
            raise ValueError(f"{path}: it is a leaf and a folder at once; a path is a leaf or a folder")
        node[name] = leaf
    return tree


def count(tree: Tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
    """Returns the bytes of all leaves, each counted once however many devices hold it."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def table(tree: Tree) -> str:
    """Returns one line "path  shape  dtype" for each leaf, sorted by path and aligned, for golden files."""
    rows = [(path, str(tuple(leaf.shape)), str(leaf.dtype)) for path, leaf in sorted(flatten_paths(tree).items())]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return "".join(f"{path:<{widths[0]}}  {shape:<{widths[1]}}  {dtype}\n" for path, shape, dtype in rows)


def digest(tree: Tree) -> str:
    """Returns 64 hex digits of paths, shapes, dtypes and exact bits: equal in every process and on every mesh."""
    total = hashlib.sha256()
    for path, leaf in sorted(flatten_paths(tree).items()):
        values = np.asarray(leaf)
        total.update(f"{path} {values.shape} {values.dtype}\n".encode())
        total.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return total.hexdigest()
