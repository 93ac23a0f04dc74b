"""Arrays of a wire folder: a tree of fp32 parameters as bf16, int8 or fp32 in one safetensors file, names = tree paths.

An array with one axis, with fewer than `SMALL` values, or of `EXACT` stays fp32. int8: codes under the path, and under
`PATH.scale` an fp32 scale for each row of the last axis: value = code x scale.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from lw_jax.core import tree
from lw_jax.core.errors import UserError
from lw_jax.core.files import measure
from lw_jax.core.types import Tree
from lw_jax.hub.tensor_files import Stored, read_safetensors, read_tensor, refuse_diverged, write_safetensors
from lw_jax.training import wire_folder
from lw_jax.training.wire_folder import REMEDY, TENSORS, DType

SMALL = 4096  # values
EXACT = re.compile(r"codes/[^/]*/(zero|decay|tables)")  # what the bytes of cache messages are coded with
SCALE = ".scale"
_KINDS = {"bf16": "BF16", "int8": "I8", "fp32": "F32"}  # in a safetensors header
_BYTES = {"BF16": 2, "I8": 1, "F32": 4}
_LEVELS = 127


def write(file: Path, params: Tree, dtype: DType) -> wire_folder.Tensors:
    """Writes the arrays as a safetensors file, in place; returns its size and hash.

    Raises:
      UserError: a value is not finite, or the disk is full.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, leaf in tree.flatten_paths(jax.device_get(params)).items():
        values = np.asarray(leaf, np.float32)
        refuse_diverged(name, values)  # here too: as int8 a NaN would be a number
        tensors |= _pack(name, values, dtype if _is_packed(name, leaf) else "fp32")
    write_safetensors(file, tensors, layout="np")
    return wire_folder.Tensors(*measure(file))


def part_bytes(params: Tree, dtype: DType) -> dict[str, int]:
    """Returns the bytes in the file of each part of the tree, as "encoder/body", the largest first."""
    sizes: dict[str, int] = {}
    for name, (kind, shape) in _expect(tree.flatten_paths(params), dtype).items():
        part = "/".join(name.split("/")[:2])
        sizes[part] = sizes.get(part, 0) + _BYTES[kind] * math.prod(shape)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def round_int8(values: np.ndarray) -> np.ndarray:
    """Returns fp32 values near these that int8 holds exactly: those that `write` and `read` give back bit for bit."""
    values = np.asarray(values, np.float32)
    # A scale of 8 bits times a code of 7 fits into a float's fraction; it is cut down, so that the largest code is 127.
    scale = (_scale(values).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return _codes(values, np.maximum(scale, np.finfo(np.float32).tiny)) * scale


def read(folder: Path, shapes: Tree, *, without: Collection[str] = ()) -> Tree:
    """Returns the arrays of a wire folder on the shardings of `shapes`, which have no part for the readers `without`.

    Raises:
      UserError: the file is missing, not what config.json says, or its tensors are not those of `shapes`.
    """
    wire, file = wire_folder.read(folder), folder / TENSORS
    if not file.is_file():
        raise UserError(f"{file}: missing: a wire folder has {wire_folder.CONFIG} and {TENSORS}; {REMEDY}")
    measured = wire_folder.Tensors(*measure(file))
    for key in ("bytes", "sha256"):
        there, stated = getattr(measured, key), getattr(wire.tensors, key)
        if there != stated:
            raise UserError(f"{file}: {key}={there}, {wire_folder.CONFIG} states {stated}: it is damaged; {REMEDY}")
    flat, stored = tree.flatten_paths(shapes), read_safetensors(file)
    absent = {(part, name) for part in ("adapters", "codes") for name in without}
    stored = {path: tensor for path, tensor in stored.items() if tuple(path.split("/")[:2]) not in absent}
    _check(file, stored, _expect(flat, wire.dtype))
    placed = [jax.device_put(_unpack(stored, name, leaf), leaf.sharding) for name, leaf in flat.items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), placed)


def _expect(flat: Mapping[str, Any], dtype: DType) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns tensor name -> (type, shape) of the file that holds these leaves."""
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, leaf in flat.items():
        if not _is_packed(name, leaf):
            wanted[name] = "F32", tuple(leaf.shape)
            continue
        wanted[name] = _KINDS[dtype], tuple(leaf.shape)
        if dtype == "int8":
            wanted[name + SCALE] = "F32", (*leaf.shape[:-1], 1)
    return wanted


def _check(file: Path, stored: Mapping[str, Stored], wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    for name in sorted(stored.keys() | wanted.keys()):
        here = (stored[name].kind, stored[name].shape) if name in stored else None
        if here != wanted.get(name):
            there, expected = (f"{spec[0]} {spec[1]}" if spec else "(absent)" for spec in (here, wanted.get(name)))
            raise UserError(f"{file}: tensor {name:.200} is {there}, its configuration wants {expected}; {REMEDY}")


def _is_packed(name: str, leaf: Any) -> bool:
    return len(leaf.shape) > 1 and math.prod(leaf.shape) >= SMALL and not EXACT.fullmatch(name)


def _pack(name: str, values: np.ndarray, dtype: DType) -> dict[str, np.ndarray]:
    if dtype == "fp32":
        return {name: np.asarray(values, order="C")}
    if dtype == "bf16":
        return {name: np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))}
    scale = _scale(values)
    return {name: np.ascontiguousarray(_codes(values, scale).astype(np.int8)), name + SCALE: scale}


def _scale(values: np.ndarray) -> np.ndarray:
    largest = np.abs(values).max(axis=-1, keepdims=True)
    return np.where(largest > 0, largest / _LEVELS, 1).astype(np.float32)


def _codes(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.rint(values / scale).clip(-_LEVELS, _LEVELS) + 0.0  # no -0, which int8 does not have


def _unpack(stored: Mapping[str, Stored], name: str, leaf: Any) -> np.ndarray:
    if stored[name].kind != "I8":
        return read_tensor(stored[name], leaf.dtype)
    codes, scale = read_tensor(stored[name], np.int8), read_tensor(stored[name + SCALE], np.float32)
    return (codes.astype(np.float32) * scale).astype(leaf.dtype)
