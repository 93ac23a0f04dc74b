"""Parameter trees by path: leaves, sizes, digests."""

import hashlib
import math
from typing import Any

import jax
import numpy as np

from lw_jax.core.types import Tree
from sharding.rules import path_of


def flatten_paths(tree: Tree) -> dict[str, Any]:
    """Returns {"layers/q": leaf} in the tree's order."""
    return {path_of(key_path): leaf for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def count(tree: Tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
    """Returns the bytes of all leaves, each counted once however many devices hold it."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def digest(tree: Tree) -> str:
    """Returns 64 hex digits of paths, shapes, dtypes and exact bits: equal in every process and on every mesh."""
    total = hashlib.sha256()
    for path, leaf in sorted(flatten_paths(tree).items()):
        values = np.asarray(leaf)
        total.update(f"{path} {values.shape} {values.dtype}\n".encode())
        total.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return total.hexdigest()
