"""AWQ folders: the three stored tensors of a packed matrix, found, checked and read in our order."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.hub.families import Place, Slot
from lw_jax.hub.tensor_files import Stored, read_tensor
from lw_jax.models import quant


class Matrix(NamedTuple):
    """The three tensors of one AWQ matrix, stored [in, out]."""

    codes: Stored
    zeros: Stored
    scales: Stored


def match(location: Path, catalogue: dict[str, Stored], slots: dict[str, Slot]) -> dict[Place, Matrix]:
    """Removes the packed matrices from both and returns them, checked."""
    matrices: dict[Place, Matrix] = {}
    for name in [name for name, slot in slots.items() if slot.path[-1] in quant.MATRICES]:
        slot, stem = slots.pop(name), name.removesuffix(".weight")
        out, size = slot.shape
        blocks = size // quant.BLOCK["awq"]
        wanted = {
            f"{stem}.qweight": ("I32", (size, out // 8)),
            f"{stem}.qzeros": ("I32", (blocks, out // 8)),
            f"{stem}.scales": ("F16", (blocks, out)),
        }
        for part, (kind, shape) in wanted.items():
            if part not in catalogue:
                raise UserError(f"{location}: tensor {part} is missing; fetch the model again")
            if (catalogue[part].kind, catalogue[part].shape) != (kind, shape):
                actual = f"{catalogue[part].kind} {catalogue[part].shape}"
                raise UserError(f"{catalogue[part].label} is {actual}, AWQ with groups of 128 asks for {kind} {shape}")
        matrices[slot.path, slot.layer] = Matrix(*(catalogue.pop(part) for part in wanted))
    return matrices


def read(stored: Matrix, shapes: Tree) -> dict[str, np.ndarray]:
    """Reads an AWQ matrix, stored [in, out], in our order [out.., in]."""
    codes, zeros = (quant.unpack_awq(read_tensor(tensor, np.int32)).T for tensor in (stored.codes, stored.zeros))
    arrays = {"codes": quant.pack_nibbles(codes), "zero": zeros, "scale": read_tensor(stored.scales, np.float16).T}
    return {name: np.ascontiguousarray(value).reshape(shapes[name].shape) for name, value in arrays.items()}
