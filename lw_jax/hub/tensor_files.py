"""Tensors of safetensors and GGUF files: their positions, and their bytes as arrays, for any model.

Bytes are read with plain file reads, not memory maps, so that the host holds the final arrays and about one tensor.
safetensors' `get_slice` takes twice the time (docs/architecture.md), and the library does not give offsets.
Nothing is ever unpickled. Weights are checked to be finite in the chunk that has just been read or converted.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import jax
import ml_dtypes
import msgspec
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.hub.gguf_header import Stored, read_header

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NUMBERS = FLOATS | {"I32": np.int32, "I8": np.int8}  # read as they are; AWQ's words of eight nibbles, a wire's codes
INTEGERS = {"I8", "I16", "I32", "I64"}  # GGUF types that hold no weights
_ALIGNMENT = 64  # bytes; what XLA asks of the memory of a CPU array
_CHUNK_BYTES = 1 << 20  # read, checked and converted at once: stays in a core's own cache
_FETCH = "fetch it again"
_ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")  # as save_pretrained names them, before it writes their index

# A plain name: nothing outside the model's own folder is opened, and no pickle.
_FileName = Annotated[str, msgspec.Meta(pattern=r"^[^/\\\x00-\x1f]+\.safetensors$", max_length=255)]


class _Index(msgspec.Struct, frozen=True):
    weight_map: Annotated[dict[str, _FileName], msgspec.Meta(min_length=1)]


def list_tensors(location: Path) -> dict[str, Stored]:
    if not location.is_dir():
        if not location.is_file():
            raise UserError(f"{location}: no such file or folder")
        if location.suffix != ".gguf":
            raise UserError(
                f"{location}: a reader is a folder with config.json and *.safetensors, or a .gguf file; convert other "
                "files (.bin, .pt are never opened) with transformers' save_pretrained"
            )
        return dict(read_header(location).tensors)
    catalogue: dict[str, Stored] = {}
    for file in _safetensors_files(location):
        for name, stored in read_safetensors(file).items():
            if name in catalogue:
                raise UserError(f"{stored.label} is in {catalogue[name].file.name} too; keep one of the two")
            catalogue[name] = stored
    return catalogue


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder that hold a model under transformers' names, listed in an index or not.

    `consolidated*` hold the same model under its authors' names, and an adapter's file no model.
    """
    files = (file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    return sorted(file for file in files if file.name != _ADAPTER[1])


def _safetensors_files(folder: Path) -> list[Path]:
    """Returns a model's files: those that its index names, where there is one.

    Raises UserError for several sets of weights that differ, an adapter beside them, and none.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = weight_files(folder)
    if files and (adapter := [name for name in _ADAPTER if (folder / name).is_file()]):
        raise UserError(
            f"{folder}: {files[0].name} is a model and {adapter[0]} an adapter of one, which transformers would add to "
            "its base; move one of the two to a folder of its own"
        )
    names = schema.read(index, _Index, remedy=_FETCH).weight_map.values() if index.is_file() else ()
    parts = [folder / name for name in sorted(set(names))]
    if single.is_file() and single not in parts:
        shards = [file for file in files if file in parts or _SHARD.fullmatch(file.name)]
        if shards and not _same(single, shards):
            listed = index.name if parts else shards[0].name
            raise UserError(
                f"{folder}: {single.name} and the shards of {listed} are different weights, and which are meant is not "
                "known; remove those of the earlier model"
            )
        return [single]
    if parts:
        if absent := [file for file in parts if not file.is_file()]:
            raise UserError(f"{index}: names {absent[0].name}, which is not in {folder}; fetch it too")
        return parts
    if len(files) == 1:
        return files
    if files:
        raise UserError(
            f"{folder}: {len(files)} .safetensors files and no {index.name} that says which belong together"
        )
    if other := sorted(file.name for suffix in ("gguf", "bin", "pt", "pth") for file in folder.glob(f"*.{suffix}")):
        rule = "is a pickle and is never opened; convert it with transformers' save_pretrained"
        rule = "is read where the file itself is named" if other[0].endswith(".gguf") else rule
        raise UserError(f"{folder}: {other[0]} {rule}")
    pickled = "if they are pickled (*.bin), convert them once with transformers: load, then save_pretrained(FOLDER)"
    raise UserError(f"{folder}: no *.safetensors in it; fetch the model's weights, or {pickled}")


def _same(single: Path, shards: list[Path]) -> bool:
    whole, sharded = read_safetensors(single), [read_safetensors(file) for file in shards]
    parts = {name: stored for shard in sharded for name, stored in shard.items()}
    return whole.keys() == parts.keys() and all(same_values(whole[name], parts[name]) for name in whole)


def same_values(one: Stored, other: Stored) -> bool:
    """Returns whether two tensors have the same values in the same type; not where one is NaN."""
    alike = (one.kind, one.shape) == (other.kind, other.shape)
    return alike and all(map(np.array_equal, read_pieces(one), read_pieces(other)))


def read_safetensors(file: Path) -> dict[str, Stored]:
    """Lists the tensors of one safetensors file by name; reads its header alone.

    Raises UserError for a header that is cut off, of other types or shapes than the format's, or that does not cover
    the file's bytes exactly, without gap and overlap. OSError for a file that is not there is the caller's.
    """
    try:
        with safe_open(str(file), "np"), file.open("rb") as stream:  # checks the format's rules
            length = int.from_bytes(stream.read(8), "little")
            table = json.loads(stream.read(length))
    except SafetensorError as error:
        raise UserError(f"{file}: {error}: it is cut off or damaged; {_FETCH}") from error
    table.pop("__metadata__", None)
    out = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        out[name] = Stored(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return out


def write_safetensors(file: Path, tensors: dict[str, np.ndarray], *, layout: Literal["np", "pt"]) -> None:
    """Writes a safetensors file, in place; `layout` names the library whose tensors they are.

    Raises UserError where a value is not finite, or it cannot be written, as on a full disk, which the library reports
    as no OSError.
    """
    for name, values in tensors.items():
        refuse_diverged(name, values)
    file.touch()
    mode = file.stat().st_mode  # by the user's umask; the library's own file is its owner's alone
    try:
        save_file(tensors, str(file), metadata={"format": layout})
        file.chmod(mode)
    except SafetensorError as error:
        size = sum(values.nbytes for values in tensors.values())
        raise UserError(
            f"{file.parent}: {size:,} bytes of tensors cannot be written ({error}); free space, or name another folder"
        ) from error


def refuse_diverged(name: str, values: np.ndarray) -> None:
    """Raises UserError for a trained array that has a value which is not finite."""
    if not _is_finite(values):
        raise UserError(f"{name}: a value is not finite, the run has diverged; train it again with a smaller rate")


def make_buffer(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Returns an array to read tensors into, one after the other.

    Fresh memory for each would be zeroed by the kernel page by page, which takes longer than reading from its cache.
    Aligned so that JAX's CPU arrays use it without a copy: refill it only after the last use of such an array.
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
    known = stored.kind in _NUMBERS  # None == np.dtype("float64") in numpy
    if order is None and known and _NUMBERS[stored.kind] == np.dtype(dtype):  # the file's bytes are the array's
        flat = out.reshape(-1)
        step = max(1, _CHUNK_BYTES // flat.itemsize)
        with stored.file.open("rb", buffering=0) as file:
            for start in range(0, flat.size, step):
                chunk = flat[start : start + step]
                _read(file, stored, start * flat.itemsize, chunk.view(np.uint8))
                _require_finite(stored, chunk)
        return out
    rows = out.reshape(1 if out.ndim == 1 else out.shape[0], -1)
    row = 0
    for piece in read_pieces(stored):
        place = slice(row, row + len(piece)) if order is None else order[row : row + len(piece)]
        with np.errstate(over="ignore"):  # refused below
            cast = piece.astype(dtype, copy=False)
        # A wider type can hold every value read: the smaller one of the two is checked.
        _require_finite(stored, piece if piece.itemsize < cast.itemsize else cast)
        rows[place] = cast
        row += len(piece)
    return out


def _require_finite(stored: Stored, values: np.ndarray) -> None:
    if not _is_finite(values):
        raise UserError(f"{stored.label} has values that are not finite as {values.dtype.name}; fetch the file again")


def _is_finite(values: np.ndarray) -> bool:
    """Returns whether no float is NaN or infinite, by two reductions over their bits: a tenth of np.isfinite's time.

    As integers the largest is the one farthest from zero among the positive floats where they are signed, and among
    the negative ones where they are not; beyond infinity are the NaN.
    """
    if values.dtype.kind in "iu" or not values.size:
        return True
    width = 8 * values.itemsize
    infinity = int(np.array(np.inf, values.dtype).view(f"u{values.itemsize}"))
    positive, negative = values.view(f"i{values.itemsize}").max(), values.view(f"u{values.itemsize}").max()
    return bool(positive < infinity and negative < infinity + 2 ** (width - 1))


def read_pieces(stored: Stored) -> Iterator[np.ndarray]:
    """Yields a tensor's rows as floats, a few at a time; a vector is one row."""
    rows = stored.shape[0] if len(stored.shape) > 1 else 1
    if not stored.nbytes:
        raise UserError(f"{stored.label} is empty, shape {stored.shape}; fetch the file again")
    row_bytes = stored.nbytes // rows
    step = max(1, _CHUNK_BYTES // row_bytes)
    with stored.file.open("rb", buffering=0) as file:
        for start in range(0, rows, step):
            count = min(step, rows - start)
            raw = _read(file, stored, start * row_bytes, np.empty(count * row_bytes, np.uint8))
            yield _decoded(stored, raw.reshape(count, row_bytes))


def _decoded(stored: Stored, raw: np.ndarray) -> np.ndarray:
    if stored.kind in _NUMBERS:
        return raw.view(_NUMBERS[stored.kind])
    if stored.kind not in GGMLQuantizationType.__members__:
        raise UserError(f"{stored.label} is stored as {stored.kind}, which is not supported; use another file")
    try:
        with np.errstate(all="ignore"):  # of scales that are not finite; `read_tensor` refuses what comes of them
            return dequantize(raw, GGMLQuantizationType[stored.kind])
    except NotImplementedError as error:
        raise UserError(f"{stored.label} has type {stored.kind}, which is not supported; use another file") from error


def _read(file: BinaryIO, stored: Stored, start: int, out: np.ndarray) -> np.ndarray:
    file.seek(stored.offset + start)
    unread = out.data
    while len(unread):
        count = file.readinto(unread)  # pyright: ignore[reportAttributeAccessIssue]  # FileIO has it
        if not count:
            raise UserError(f"{stored.label} is cut off; fetch the file again")
        unread = unread[count:]
    return out
