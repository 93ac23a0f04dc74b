"""NLL of a text's tokens under an encoder's body as it was pretrained, whole and causal.

Kept on disk by content, so that each different text is read once, whatever the run trains.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from lw_jax.core import precision
from lw_jax.core.config import Config
from lw_jax.core.progress import say
from lw_jax.core.types import Tree
from lw_jax.data.batches import Batch, Field
from lw_jax.data.frozen_cache import Store, key_of
from lw_jax.data.prompt_tokens import MARGIN, WIDEST
from lw_jax.data.tokens import load_tokenizer, marked
from lw_jax.evals.selection import Scored
from lw_jax.hub import sources, weights
from lw_jax.losses import chunked
from lw_jax.models import decoder
from sharding import mesh as meshes
from sharding import place, rules, tables
from sharding.placement import Placement

ROWS = 8  # windows of a device at once: the same program on any number of devices
MULTIPLE = 64  # a batch is padded to a multiple of so many tokens
TEXTS = 1024  # tokenised at once


class Surprisal:
    """Reads texts with a pretrained decoder; loads it only where a text is new, and lets it go afterwards."""

    def __init__(self, cfg: Config, location: Path, placement: Placement):
        """Opens the cache; the model runs on this process's devices of the trainable parameters' mesh."""
        self.location, self.tokenizer = location, load_tokenizer(location)
        self.window, self.limit = cfg.encoder.window, cfg.encoder.window * cfg.encoder.windows
        devices = [device for device in placement.learner.devices.flat if device.process_index == jax.process_index()]
        self.mesh = meshes.make(devices=devices)
        self.precision = precision.of(cfg.compute.dtype, placement.platform)
        self.chunk = chunked.positions(cfg.compute.logits_chunk, rows=ROWS, data=1)
        # What the first token follows: the tokenizer's own beginning, else the end of another document.
        self.begin = self.tokenizer.begin or (self.tokenizer.eos,)
        identity = {
            "weights": weights.identify(location),
            "tokenizer": self.tokenizer.fingerprint,
            "arithmetic": list(self.precision),
        }
        row = {"values": ((self.window,), np.float16)}
        self.store = Store(sources.cache_root() / "surprisal", identity, rows=row)  # of windows
        self._config, self._params = weights.describe(location), None
        self._measure = jax.jit(self._nll)

    def score(self, texts: Sequence[str]) -> list[Scored]:
        """Returns every token's characters and NLL, of a text's first window x windows tokens.

        A longer text than a window is read in windows that overlap by half: of all but the first, the second half
        counts, so that no token in the middle is read without what stands before it.
        """
        scored = []
        for first in range(0, len(texts), TEXTS):
            scored += self._score(texts[first : first + TEXTS])
        self._params = None
        return scored

    def _score(self, texts: Sequence[str]) -> Iterator[Scored]:
        tokenized = self._tokenize(texts)
        cuts = [_cut(len(ids), self.window) for ids, _ in tokenized]
        windows = [
            ids[start : start + self.window] for (ids, _), cut in zip(tokenized, cuts, strict=True) for start in cut
        ]
        keys = [key_of(ids) for ids in windows]
        # Windows of similar lengths share a batch, and so its padding.
        order = sorted(range(len(windows)), key=lambda i: len(windows[i]))
        count = self.store.fill(
            [keys[i] for i in order],
            lambda positions: self._read([windows[order[i]] for i in positions]),
            batch=ROWS * self.mesh.shape["data"],
            what="how predictable each word is",
        )
        if count:
            say(f"{count:,} windows of text read for how predictable each word is; cached in {self.store.folder}")
        rows = iter(self.store.read(keys)["values"])
        for (ids, spans), cut in zip(tokenized, cuts, strict=True):
            yield Scored(spans, _join([next(rows) for _ in cut], cut, len(ids)))

    def _tokenize(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns each text's ids i32[n] and their characters i32[n 2]."""
        most = WIDEST * (self.limit + MARGIN)
        tokenized = []
        for ids, spans in self.tokenizer.encode_spans([text[:most] for text in texts]):
            bare = marked(ids, self.begin)[len(self.begin) :]  # a text may have brought the beginning itself
            tokenized.append((bare[: self.limit], spans[len(ids) - len(bare) :][: self.limit]))
        return tokenized

    def _read(self, windows: Sequence[np.ndarray]) -> Batch:
        """Returns the values of a batch of windows, each padded to the longest that there may be."""
        values = np.asarray(jax.device_get(self._measure(self._load(), self._collate(windows))))
        return {"values": np.pad(values, ((0, 0), (0, self.window - values.shape[1])))}

    def _collate(self, windows: Sequence[np.ndarray]) -> Tree:
        """Returns {"ids", "mask", "targets"} on the devices; "ids" has the beginning before the targets."""
        longest = max(max(map(len, windows)), 1)
        width = min(place.round_up(longest, MULTIPLE), self.window)
        whole = [np.append(np.array(self.begin, np.int32), window) for window in windows]
        inputs = Field(whole, len(self.begin) + width, self.tokenizer.pad, left=False)
        targets = Field(list(windows), width, 0, left=False)
        rows = range(len(windows))
        return place.put_eval(inputs.collate(rows) | {"targets": targets.collate(rows)["ids"]}, self.mesh)

    def _nll(self, params: Tree, batch: Tree) -> jax.Array:
        """Returns f32[b t] of a batch {"ids", "mask", "targets"}: each target's NLL, with the body's own head."""
        x, mode = decoder.embed(params, batch["ids"]), decoder.Mode(factors=self.precision.factors)
        hidden = decoder.forward(params, self._config, x, mask=batch["mask"], mode=mode).hidden
        hidden = hidden[:, len(self.begin) - 1 : -1]
        return -chunked.token_logp(hidden, decoder.head(params), batch["targets"], chunk=self.chunk)[0]

    def _load(self) -> Tree:
        if self._params is None:
            dtypes = self.precision
            shapes = decoder.abstract(self._config, dtypes.values, factors=dtypes.factors)
            placed = rules.shardings(tables.reader_table("replicate"), shapes, self.mesh, name=str(self.location))
            self._params = weights.load(self.location, dtype=dtypes.values, factors=dtypes.factors, shardings=placed)
        return self._params


def _join(rows: Sequence[np.ndarray], starts: Sequence[int], tokens: int) -> np.ndarray:
    """Returns the values f32[n] of a text's tokens in its windows: of each, what the one before it does not have."""
    values, count = np.zeros(tokens, np.float32), 0
    for row, start in zip(rows, starts, strict=True):
        end = min(start + len(row), tokens)
        values[count:end] = row[count - start : end - start]
        count = end
    return values


def _cut(tokens: int, window: int) -> list[int]:
    """Returns where the windows of a text begin: half a window apart, as few as reach its end."""
    half = max(1, window // 2)
    return [half * number for number in range(1 + max(0, -(-(tokens - window) // half)))]
