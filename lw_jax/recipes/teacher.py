"""The text-prompted reader's likeliest answer tokens, computed once an example and kept on disk.

A store belongs to one reader, as it is prompted (weights, tokenizer, template, words, temperature); its rows belong to
examples, found again by what the reader is given, so that another data set or order takes up what is there.
"""

import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax import sources
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.data.batches import Batch, Encoded, Lookup
from lw_jax.models import wire
from sharding import place
from sharding.placement import Placement

FORMAT = 1
_KEY_BYTES = 16


class Store:
    """Rows {"ids": i32[t k], "logp": f16[t k]} by example; t and k are part of `meaning`."""

    def __init__(self, root: Path, meaning: dict, *, tokens: int, likeliest: int):
        said = json.dumps([FORMAT, meaning, tokens, likeliest], sort_keys=True)
        self.folder = root / hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shape = (tokens, likeliest)
        self._rows: dict[bytes, int] = {}

    def fill(self, keys: Sequence[bytes], compute: Callable[[list[int]], Batch], *, batch: int) -> int:
        """Computes the rows that are missing, `batch` positions at a time (the last repeated); returns how many."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two jobs one computes, the other finds it done
            self._read_keys()
            missing = [i for i, key in enumerate(keys) if key not in self._rows]
            missing = list({keys[i]: i for i in missing}.values())
            for start in range(0, len(missing), batch):
                chosen = missing[start : start + batch]
                rows = compute(chosen + chosen[-1:] * (batch - len(chosen)))
                self._append([keys[i] for i in chosen], {name: value[: len(chosen)] for name, value in rows.items()})
        return len(missing)

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """Returns positions -> rows; before `fill` the rows have their shape and no meaning."""

        def rows(positions: Sequence[int]) -> Batch:
            if not all(keys[i] in self._rows for i in positions):
                return {
                    "ids": np.zeros((len(positions), *self.shape), np.int32),
                    "logp": np.zeros((len(positions), *self.shape), np.float16),
                }
            at = [self._rows[keys[i]] for i in positions]
            return {"ids": self._map("ids", np.int32)[at], "logp": self._map("logp", np.float16)[at]}

        return rows

    def _map(self, name: str, dtype: type) -> np.ndarray:
        return np.memmap(self.folder / name, dtype, "r", shape=(len(self._rows), *self.shape))

    def _read_keys(self) -> None:
        """Reads which rows are whole, and cuts off what a stopped job left behind them."""
        values = math.prod(self.shape)
        sizes = {"keys": _KEY_BYTES, "ids": 4 * values, "logp": 2 * values}
        for name in sizes:
            (self.folder / name).touch()
        # A machine that lost its power may have kept a key and not its row.
        count = min((self.folder / name).stat().st_size // size for name, size in sizes.items())
        for name, size in sizes.items():
            os.truncate(self.folder / name, count * size)
        held = (self.folder / "keys").read_bytes()
        self._rows = {held[i * _KEY_BYTES : (i + 1) * _KEY_BYTES]: i for i in range(count)}

    def _append(self, keys: list[bytes], rows: Batch) -> None:
        """Writes rows first and then their keys, which make them valid."""
        for name, values in (("ids", rows["ids"].astype(np.int32)), ("logp", rows["logp"].astype(np.float16))):
            with (self.folder / name).open("ab") as out:
                out.write(np.ascontiguousarray(values).tobytes())
        with (self.folder / "keys").open("ab") as out:
            out.write(b"".join(keys))
        self._rows |= {key: len(self._rows) + i for i, key in enumerate(keys)}


class Teacher:
    """Gives data sets the kept tokens of every reader, as soon as the readers are loaded."""

    def __init__(self, cfg: Config, wired: wire.Wire, placement: Placement, told: Mapping[str, dict]):
        """`told` names each reader's weights, tokenizer and template."""
        if jax.process_count() > 1:
            raise UserError(
                f"config.loss.teacher_k={cfg.loss.teacher_k}: the teacher's tokens are kept by one process only; "
                "set it to 0: the teacher then reads in each step"
            )
        self.cfg, self.wire, self.placement = cfg, wired, placement
        words = {"prompt": dataclasses.asdict(cfg.prompt), "temperature": cfg.loss.temperature}
        self.stores = {
            name: Store(
                sources.cache_root() / "teacher",
                words | told[name],
                tokens=cfg.data.answer_tokens,
                likeliest=min(cfg.loss.teacher_k, reader.config.vocab),
            )
            for name, reader in wired.readers.items()
        }
        self._waiting: list[Encoded] = []
        self._readers: Tree | None = None

    def attend(self, encoded: Encoded) -> Encoded:
        """Returns the data set without its text prompts; their teacher's tokens are at hand once readers are."""
        self._waiting.append(encoded)
        self._teach()
        readers = {
            name: {key: field for key, field in fields.items() if key != "text"}
            for name, fields in encoded.readers.items()
        }
        return dataclasses.replace(
            encoded, readers=readers, teachers={name: self._lookup(name, encoded) for name in self.stores}
        )

    def begin(self, readers: Tree) -> None:
        """Takes the loaded readers and teaches what waits."""
        self._readers = readers
        self._teach()

    def _teach(self) -> None:
        if self._readers is None:
            return
        waiting, self._waiting = self._waiting, []
        size = place.round_up(self.cfg.eval.batch, self.placement.data)
        for encoded in waiting:
            for name, store in self.stores.items():
                count = store.fill(keys_of(encoded, name), functools.partial(self._read, name, encoded), batch=size)
                if count:
                    print(f"teacher {name}: {count} examples read with their text; kept in {store.folder}", flush=True)

    def _lookup(self, name: str, encoded: Encoded) -> Lookup:
        found, tokens = self.stores[name].lookup(keys_of(encoded, name)), encoded.readers[name]["answer"].width
        return lambda positions: {key: rows[:, :tokens] for key, rows in found(positions).items()}

    def _read(self, name: str, encoded: Encoded, positions: list[int]) -> Batch:
        """Returns the rows of some examples, padded to the store's length."""
        fields = place.put_eval(encoded.collate(positions)["readers"][name], self.placement.readers[name].mesh)
        assert self._readers is not None
        ids, logp = jax.device_get(self._likeliest(self._readers[name], fields, name))
        missing = ((0, 0), (0, self.cfg.data.answer_tokens - ids.shape[1]), (0, 0))
        return {"ids": np.pad(ids, missing), "logp": np.pad(logp, missing)}

    @functools.cached_property
    def _likeliest(self):
        def run(params: Tree, fields: Mapping, name: str) -> tuple[jax.Array, jax.Array]:
            text = wire.text_prompt(params, fields["text"])
            logits = self.wire.answer_logits(params, name, text, fields["answer_inputs"])
            count = self.stores[name].shape[1]
            return likeliest(logits, count=count, temperature=self.cfg.loss.temperature)

        return jax.jit(run, static_argnames="name")


def keys_of(encoded: Encoded, name: str) -> list[bytes]:
    """Returns, for each example, the digest of what the reader is given: its text prompt and the answer's tokens."""
    fields = encoded.readers[name]
    return [
        hashlib.blake2b(text.tobytes() + b"|" + answer.tobytes(), digest_size=_KEY_BYTES).digest()
        for text, answer in zip(fields["text"].ids, fields["answer"].ids, strict=True)
    ]


def likeliest(logits: jax.Array, *, count: int, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Returns ids and log-probabilities [b t k] of the likeliest tokens at a temperature."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=2)
    values, ids = jax.lax.top_k(logp, count)
    return ids, values
