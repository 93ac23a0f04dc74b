"""Words of a text that questions ask for: tokens scored by a ridge regression to the answers of the training data.

Of held-out questions twice as many have all words of their answer among so chosen literals as among the least
predictable words (docs/experiments.md).
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import processes
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase
from lw_jax.core.types import Example, Tree
from lw_jax.data.examples import spread
from lw_jax.data.frozen_cache import save_array
from lw_jax.hub import sources
from lw_jax.models import decoder, encoder
from lw_jax.models.alignment import EXACTLY
from lw_jax.recipes.token_scores import TokenScores
from sharding.placement import Placement

DEPTH = 2 / 3  # of the body's layers: measured at a third, two thirds and the end, with 30 layers
RIDGE = 0.02  # of each standardised value's variance
TEXTS = 1024  # that the regression is computed from, at most
LEAST = 0.1  # of the training answers that must stand in their texts

Spans = Sequence[tuple[int, int]]  # first character of an answer in its text, and the one after the last


class AskedWords(TokenScores):
    """Each token's likeness to those of answers: its state at two thirds of the layers times a kernel f32[d]."""

    kind = "asked"
    what = "how like an answer each word is"
    mean = True

    def __init__(self, cfg: Config, location: Path, placement: Placement, kernel: np.ndarray | None = None):
        """Takes a kernel that was fitted, or one after `fit`."""
        super().__init__(cfg, location, placement)
        self.kernel = np.zeros(0, np.float32)
        if kernel is not None:
            self._take(kernel)

    def fit(self, examples: Sequence[Example]) -> np.ndarray:
        """Returns the kernel that finds the answers of training examples; computed, or taken from the cache.

        Raises UserError where hardly an answer stands in its text.
        """
        answers = _find_answers(examples)
        texts = list(answers)
        chosen = {texts[i]: answers[texts[i]] for i in spread(len(texts), TEXTS)}
        said = json.dumps([self.identity, [DEPTH, RIDGE, self.window], list(chosen.items())], sort_keys=True)
        path = sources.cache_root() / self.kind / f"{hashlib.blake2b(said.encode(), digest_size=12).hexdigest()}.npy"
        if not path.exists():
            save_array(path, self._solve(chosen))
            print(f"word selector fitted on {len(chosen):,} texts; kept in {path}", flush=True)
        # Of another processor, or of a node's own cache, it may differ in its last bits, and so in the words.
        self._take(np.array(processes.from_first(lambda: np.load(path).tolist()), np.float32))
        return self.kernel

    def _take(self, kernel: np.ndarray) -> None:
        self.kernel = np.asarray(kernel, np.float32)
        self.identity = self.identity | {"kernel": hashlib.blake2b(self.kernel.tobytes(), digest_size=12).hexdigest()}

    def _values(self, params: Tree, batch: Tree) -> jax.Array:
        return jnp.einsum("btd,d->bt", self._states(params, batch), jnp.asarray(self.kernel))

    def _states(self, params: Tree, batch: Tree) -> jax.Array:
        """Returns each target's own state, f32[b t d]."""
        x, taps = decoder.embed(params, batch["ids"]), (int(DEPTH * self.config.layers),)
        states = encoder.tapped_states(params, self.config, x, mask=batch["mask"], taps=taps, mode=self.mode)
        return decoder.unit_rms(states[0].astype(jnp.float32), self.config.norm_eps)[:, len(self.begin) :]

    def _solve(self, answers: Mapping[str, Spans]) -> np.ndarray:
        """Returns the kernel f32[d] of a ridge regression to 1 at the answers' tokens, over standardised states."""
        count, width = 0.0, self.config.width
        shift = np.zeros(width, np.float32)
        sums = {"x": np.zeros(width), "xx": np.zeros((width, width)), "xy": np.zeros(width), "y": np.zeros(())}
        batches = -(-len(answers) // self._batch)
        with phase("fitting the word selector on texts", batches, f"batches of {self._batch}") as done:
            for weights, labels, windows in done.track(self._label(answers)):
                batch = self._collate(windows)
                length = batch["targets"].shape[1]
                given = self._load(), batch, labels[:, :length], weights[:, :length]
                if not count:  # squares around a mean are exact where those around 0 are not
                    shift = np.asarray(self._moments(*given, shift)["x"]) / weights.sum()
                found = jax.device_get(self._moments(*given, shift))
                count += weights.sum()
                sums = {key: sums[key] + np.asarray(found[key], np.float64) for key in sums}
        self._params = None
        mean, answered = sums["x"] / count, sums["y"] / count
        covariance = sums["xx"] / count - np.outer(mean, mean)
        size = np.sqrt(np.diag(covariance)) + 1e-3
        to_answers = (sums["xy"] / count - mean * answered) / size
        kernel = np.linalg.solve(covariance / np.outer(size, size) + RIDGE * np.eye(width), to_answers) / size
        return kernel.astype(np.float32)

    def _label(self, answers: Mapping[str, Spans]) -> Iterator[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]:
        """Yields weights and labels f32[b window] of batches of texts' first windows, and their ids."""
        texts = list(answers)
        for first in range(0, len(texts), self._batch):
            part = texts[first : first + self._batch]
            weights, labels = (np.zeros((self._batch, self.window), np.float32) for _ in range(2))
            windows = []
            for row, (text, tokens) in enumerate(zip(part, self._tokenize(part), strict=True)):
                spans = tokens.spans[: self.window]
                weights[row, : len(spans)] = 1.0
                for start, end in answers[text]:
                    labels[row, : len(spans)] += (spans[:, 0] < end) & (spans[:, 1] > start)
                windows.append(tokens.ids[: self.window])
            yield weights, np.minimum(labels, 1.0), windows + windows[-1:] * (self._batch - len(windows))

    @functools.cached_property
    def _moments(self):
        """Returns jitted (body, batch, labels, weights [b t], shift [d]) -> sums over tokens of the states less it."""

        def run(params: Tree, batch: Tree, labels: jax.Array, weights: jax.Array, shift: jax.Array) -> Tree:
            return _multiply((self._states(params, batch) - shift[None, None]) * weights[:, :, None], labels, weights)

        return jax.jit(run)


@EXACTLY
def _multiply(x: jax.Array, labels: jax.Array, weights: jax.Array) -> Tree:
    return {
        "x": jnp.sum(x, axis=(0, 1)),
        "xx": jnp.einsum("btd,bte->de", x, x),
        "xy": jnp.einsum("btd,bt->d", x, labels),
        "y": jnp.sum(labels * weights),
    }


def _find_answers(examples: Sequence[Example]) -> dict[str, list[tuple[int, int]]]:
    """Returns where the answers of each text stand in it, of texts that have one."""
    found: dict[str, list[tuple[int, int]]] = {}
    count = 0
    for example in examples:
        at = example.context.find(example.answers[0])
        if at >= 0:
            count += 1
            found.setdefault(example.context, []).append((at, at + len(example.answers[0])))
    if count < LEAST * len(examples):
        raise UserError(
            f"config.message.choice = 'asked': {count} of {len(examples)} answers of data.train stand in their texts; "
            f"at least {LEAST:.0%} must, so that words can be chosen by them; set 'surprisal'"
        )
    return found
