"""On-disk cache of frozen-model outputs, one row an example.

A store belongs to one model, as it is asked (weights, tokenizer, words); its rows belong to examples, found again by a
key of what the model is given, so that another data set or order takes up what is there. Each node writes files of its
own: the locks of some file systems (BeeGFS, Lustre with localflock) hold within a node only.
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash, locked, make_cache
from lw_jax.core.progress import phase

Rows = dict[str, Any]  # arrays [b ...]
FORMAT = 4  # 4: files of each node
KEY_BYTES = 16


class Store:
    """Rows of named arrays by example; `rows` gives each array's shape and dtype for one example."""

    def __init__(self, root: Path, meaning: Any, *, rows: Mapping[str, tuple[tuple[int, ...], type]]):
        self.rows = {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in rows.items()}
        shapes = {name: [shape, str(dtype)] for name, (shape, dtype) in self.rows.items()}
        self.folder = make_cache(root / content_hash([FORMAT, meaning, shapes], size=8))
        self._sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in self.rows.items()}
        self._sizes["keys"] = KEY_BYTES
        self._own = self.folder / f"node-{os.uname().nodename}"
        self._rows: dict[bytes, tuple[Path, int]] = {}  # key -> folder of its files, place in them

    def fill(
        self, keys: Sequence[bytes], compute: Callable[[list[int]], Rows], *, batch: int, what: str = "rows"
    ) -> int:
        """Computes the rows that are missing, `batch` positions at a time (the last repeated); returns how many.

        `what` says to people what is computed.
        """
        self._read_keys()
        if self._rows.keys() >= set(keys):  # no waiting for a job that computes others, no writing
            return 0
        with locked(self.folder / "lock"):  # of two jobs one computes, the other finds it done
            self._cut()
            self._read_keys()
            missing = [i for i, key in enumerate(keys) if key not in self._rows]
            missing = list({keys[i]: i for i in missing}.values())
            starts = range(0, len(missing), batch)
            with phase(f"computing {what} for the cache", len(starts), f"batches of {batch}") as done:
                for start in done.track(starts):
                    chosen = missing[start : start + batch]
                    rows = compute(chosen + chosen[-1:] * (batch - len(chosen)))
                    self._append(
                        [keys[i] for i in chosen], {name: value[: len(chosen)] for name, value in rows.items()}
                    )
        return len(missing)

    def read(self, keys: Sequence[bytes]) -> Rows:
        """Returns the rows of examples. Raises UserError for one that `fill` was not asked for."""
        missing = [key for key in keys if key not in self._rows]
        if missing:
            raise UserError(
                f"{self.folder}: no row for {len(missing)} of {len(keys)} requested examples, as {missing[0].hex()}: "
                "they were never computed, or the folder has been changed; remove it, it is then computed anew"
            )
        rows = {name: np.empty((len(keys), *shape), dtype) for name, (shape, dtype) in self.rows.items()}
        places = [self._rows[key] for key in keys]
        try:
            for folder in {folder for folder, _ in places}:
                here = [i for i, (where, _) in enumerate(places) if where == folder]
                numbers = [places[i][1] for i in here]
                for name, (shape, dtype) in self.rows.items():
                    stored = np.memmap(folder / name, dtype, "r", shape=(max(numbers) + 1, *shape))
                    rows[name][here] = stored[numbers]
        except (OSError, ValueError) as error:  # a file that became shorter cannot be mapped
            raise UserError(
                f"{self.folder}: changed while it is read ({error}); remove it, it is then computed anew"
            ) from error
        return rows

    def _read_keys(self) -> None:
        """Reads which rows are whole, of all nodes."""
        self._rows = {}
        for file in sorted(self.folder.glob("*/keys")):
            count, raw = self._count(file.parent), file.read_bytes()
            self._rows |= {raw[i * KEY_BYTES : (i + 1) * KEY_BYTES]: (file.parent, i) for i in range(count)}

    def _count(self, folder: Path) -> int:
        # A machine that lost its power may have kept a key and not its row.
        files = {folder / name: size for name, size in self._sizes.items()}
        return min(file.stat().st_size // size if file.exists() else 0 for file, size in files.items())

    def _cut(self) -> None:
        """Cuts off what a stopped job of this node left behind its whole rows."""
        self._own.mkdir(exist_ok=True)
        count = self._count(self._own)
        for name, size in self._sizes.items():
            with (self._own / name).open("ab") as file:
                file.truncate(count * size)

    def _append(self, keys: list[bytes], rows: Rows) -> None:
        """Writes rows first and then their keys, which make them valid."""
        for name, (_, dtype) in self.rows.items():
            with (self._own / name).open("ab") as out:
                out.write(np.ascontiguousarray(rows[name], dtype).tobytes())
        with (self._own / "keys").open("ab") as out:
            first = out.tell() // KEY_BYTES
            out.write(b"".join(keys))
        self._rows |= {key: (self._own, first + i) for i, key in enumerate(keys)}


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """A frozen model's outputs for a data set's examples, by their positions in it."""

    store: Store
    keys: Sequence[bytes]
    length: int | None = None  # of the rows' first axis that is taken; None: all
    blank: bool = False  # zeros in their place, which need no cached row

    def __call__(self, positions: Sequence[int]) -> Rows:
        """Returns the rows [b ...]. Raises UserError naming a row that is missing."""
        if self.blank:
            rows = {name: np.zeros((len(positions), *shape), kind) for name, (shape, kind) in self.store.rows.items()}
        else:
            rows = self.store.read([self.keys[i] for i in positions])
        return rows if self.length is None else {name: value[:, : self.length] for name, value in rows.items()}


def key_of(*parts: np.ndarray) -> bytes:
    """Returns the digest of what the model is given."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
    return digest.digest()
