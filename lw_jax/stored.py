"""Where a model's tensors lie in safetensors or GGUF files, and their bytes as arrays; knows no model's shape.

Bytes are read with plain file reads, not memory maps, so that the host holds the final arrays and about one tensor.
Nothing is ever unpickled.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from lw_jax.core.errors import UserError
from lw_jax.data.gguf_header import read_header

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NUMBERS = FLOATS | {"I32": np.int32}  # read as they are; AWQ's words of eight nibbles
# of the safetensors format; those that are no float are named so that a header with them can be checked and refused
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_WIDTHS |= {"U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
INTEGERS = {"I8", "I16", "I32", "I64"}  # GGUF types that hold no weights
_ALIGNMENT = 64  # bytes; what XLA asks of the memory of a CPU array
_CHUNK_BYTES = 8 << 20  # read and converted at once
_HEADER_LIMIT = 100 << 20  # the safetensors library's own


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor's bytes lie; `shape` is [out, in] for a matrix."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def label(self) -> str:
        """Names the tensor in messages."""
        return f"{self.file}: tensor {self.name}"


def list_tensors(location: Path) -> dict[str, Stored]:
    """Lists every tensor of a model by name."""
    if not location.is_dir():
        require_gguf(location)
        return {
            name: Stored(location, name, info.kind, info.shape, info.offset, info.nbytes)
            for name, info in read_header(location).tensors.items()
        }
    catalogue: dict[str, Stored] = {}
    for file in _safetensors_files(location):
        for name, stored in _safetensors_header(file).items():
            if name in catalogue:
                raise UserError(f"{stored.label} stands in {catalogue[name].file.name} too; keep one of the two")
            catalogue[name] = stored
    return catalogue


def require_gguf(location: Path) -> None:
    """Refuses what is no .gguf file."""
    if not location.is_file():
        raise UserError(f"{location}: no such file or folder")
    if location.suffix != ".gguf":
        raise UserError(
            f"{location}: a reader is a folder with config.json and *.safetensors, or a .gguf file; convert other "
            "files (.bin, .pt are never opened) with transformers' save_pretrained"
        )


def _safetensors_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index}: no weight_map can be read in it ({error}); fetch it again") from error
        files = [folder / Path(name).name for name in names]
        if absent := [file for file in files if not file.is_file()]:
            raise UserError(f"{index}: names {absent[0].name}, which is not in {folder}; fetch it too")
        return files
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise UserError(
            f"{folder}: {len(files)} .safetensors files and no {index.name} that says which belong together"
        )
    if pickled := sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}")):
        raise UserError(
            f"{folder}: {pickled[0]} is a pickle and is never opened; convert it with transformers' save_pretrained"
        )
    raise UserError(f"{folder}: no *.safetensors in it; fetch the model's weights")


def _safetensors_header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise UserError(
                f"{file}: a header of {length} bytes in a file of {size}; it is cut off or no safetensors file"
            )
        text = stream.read(length)
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        entries = {name: (row["dtype"], tuple(row["shape"]), tuple(row["data_offsets"])) for name, row in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: its safetensors header cannot be read ({error}); fetch it again") from error
    out = {}
    for name, (kind, shape, (begin, end)) in entries.items():
        stored = Stored(file, name, kind, shape, 8 + length + begin, end - begin)
        if begin < 0 or (kind in _WIDTHS and stored.nbytes != math.prod(shape) * _WIDTHS[kind]):
            raise UserError(f"{stored.label} has {stored.nbytes} bytes, which shape {shape} of {kind} does not fill")
        if 8 + length + end > size:
            raise UserError(f"{stored.label} ends at byte {8 + length + end}, the file at {size}; fetch it again")
        out[name] = stored
    return out


def make_buffer(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Returns an array to read tensors into, one after the other.

    Fresh memory for each would be zeroed by the kernel page by page, which takes longer than reading from its cache.
    Laid so that JAX's CPU arrays take it as it is: whoever fills it again must be done with the array made of it.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def read_tensor(
    stored: Stored, dtype: jax.typing.DTypeLike, order: np.ndarray | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """Reads one tensor, cast, its rows put in `order`; into `out`, contiguous and of that type, where one is given."""
    out = np.empty(stored.shape, dtype) if out is None else out.reshape(stored.shape)
    if order is None and _NUMBERS.get(stored.kind) == np.dtype(dtype):  # the file's bytes are the array's
        _read(stored, 0, out.reshape(-1).view(np.uint8))
        return out
    rows = out.reshape(1 if out.ndim == 1 else out.shape[0], -1)
    at = 0
    for piece in read_pieces(stored):
        place = slice(at, at + len(piece)) if order is None else order[at : at + len(piece)]
        rows[place] = piece
        at += len(piece)
    return out


def read_pieces(stored: Stored) -> Iterator[np.ndarray]:
    """Yields a tensor's rows as floats, a few at a time; a vector is one row."""
    rows = stored.shape[0] if len(stored.shape) > 1 else 1
    row_bytes = stored.nbytes // rows
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        raw = _read(stored, start * row_bytes, np.empty(count * row_bytes, np.uint8))
        if stored.kind in _NUMBERS:
            yield raw.view(_NUMBERS[stored.kind]).reshape(count, -1)
            continue
        try:
            yield dequantize(raw.reshape(count, row_bytes), GGMLQuantizationType[stored.kind])
        except NotImplementedError as error:
            raise UserError(
                f"{stored.label} has type {stored.kind}, which is not supported; use another file"
            ) from error


def _read(stored: Stored, start: int, out: np.ndarray) -> np.ndarray:
    """Fills an array of bytes."""
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.offset + start)
        rest = out.data
        while len(rest):
            count = file.readinto(rest)
            if not count:
                raise UserError(f"{stored.label} is cut off; fetch the file again")
            rest = rest[count:]
    return out
