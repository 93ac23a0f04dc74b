"""GGUF header: metadata and tensor table, without reading a weight.

The `gguf` package's own reader makes several arrays for every token of the vocabulary (11 s for Qwen2.5's 151,936 where
this takes 0.4 s, on 2 busy cores) and reports a truncated file by an error of numpy's. Its dequantisation is used.
"""

import dataclasses
import functools
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from lw_jax.core.errors import UserError

MAGIC = b"GGUF"
_ALIGNMENT = 32  # bytes, where none is stated
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value types of the format: u8 i8 u16 i16 u32 i32 f32 bool, then u64 i64 f64
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Position of one tensor's bytes in a file, of this format or another; `shape` is [out, in] for a matrix."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int

    @property
    def label(self) -> str:
        return f"{self.file}: tensor {self.name}"


class Header(NamedTuple):
    """Header of a file; array fields are lists."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]


class _Cursor:
    """Cursor in a byte buffer that refuses to pass its end."""

    def __init__(self, data: memoryview):
        self.data = data
        self.position = 0

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.data):
            raise EOFError
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("<Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind}")
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item in _SCALARS:
            form = np.dtype(_SCALARS[item])
            return np.frombuffer(self.take(form.itemsize * count), form).tolist()
        if item != _STRING:
            raise ValueError(f"array of value type {item}")
        return [self.string() for _ in range(count)]


def read_header(path: Path) -> Header:
    """Returns metadata and tensor table of a GGUF file.

    Raises UserError for another format, an unknown version, and fewer bytes than the file itself announces.
    """
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4)  # shapes, weights, tokenizer and fingerprint of one start all ask
def _read_header(path: Path, size: int, _changed: int) -> Header:
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise UserError(f"{path}: does not begin with {MAGIC!r}, so it is no GGUF file; name a .gguf file")
    try:
        header = _parse(path, _Cursor(np.memmap(path, np.uint8, "r").data))
    except EOFError:
        raise UserError(
            f"{path}: its header ends past the file's {size} bytes; it is cut off, fetch it again"
        ) from None
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise UserError(f"{path}: malformed or unsupported GGUF header ({error}); fetch or convert it again") from error
    for stored in header.tensors.values():
        if (end := stored.offset + stored.nbytes) > size:
            raise UserError(f"{stored.label} ends at byte {end}, the file at {size}; it is cut off, fetch it again")
    return header


def _parse(path: Path, cursor: _Cursor) -> Header:
    cursor.take(len(MAGIC))
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, little-endian {_VERSIONS} are read")
    tensor_count, field_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    table = [_tensor(path, cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    data = -(-cursor.position // alignment) * alignment
    return Header(metadata, {row.name: dataclasses.replace(row, offset=row.offset + data) for row in table})


def _tensor(path: Path, cursor: _Cursor) -> Stored:
    """Returns one row of the table, its offset still from the start of the tensors' bytes."""
    name, axes = cursor.string(), cursor.scalar("<I")
    dims = [cursor.scalar("<Q") for _ in range(axes)]
    kind = GGMLQuantizationType(cursor.scalar("<I"))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block:
        raise ValueError(f"tensor {name}: rows of {dims[:1]} values do not fill {kind.name} blocks of {block}")
    # the format lists the fastest dimension first
    nbytes = math.prod(dims) // block * block_bytes
    return Stored(path, name, kind.name, tuple(reversed(dims)), cursor.scalar("<Q"), nbytes)
