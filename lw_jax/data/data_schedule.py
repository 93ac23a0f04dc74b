"""Data schedule of a run: phases of batches, each a mixture of encoded streams, with drawn message shapes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, Self

import grain
import jax
import numpy as np

from lw_jax.core.files import content_hash
from lw_jax.core.types import Frozen, Tree
from lw_jax.data.batches import Batch


class Stream(Protocol):
    """A tokenised data set."""

    @property
    def task(self) -> str: ...

    def __len__(self) -> int: ...

    def collate(self, indices: Sequence[int], *, sizes: np.ndarray | None = None) -> Batch:
        """Returns a batch of the examples at those positions; `sizes`: see `_draw`, of no use without messages."""
        ...

    def digest(self) -> str: ...

    def probe(self) -> Batch:
        """Returns a batch of one example for its shapes and types; what a frozen model gives may be zeros."""
        return self.collate([0])

    def describe(self) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive batches of one mixture; each batch is of one stream, each example has a drawn message shape."""

    steps: int
    streams: tuple[tuple[Stream, float], ...]  # with weights above 0
    slots: tuple[int, ...] = ()  # drawn uniformly; empty: the stream's own
    ratios: tuple[int, ...] = ()  # instead of slots: source tokens a slot
    widths: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()  # trainable parts that these batches do not train: "frozen" in their "source"

    def mark(self, batch: Batch) -> Batch:
        """Returns the batch with the frozen parts in its structure."""
        return {**batch, "source": {**batch["source"], "frozen": Frozen(self.frozen)}} if self.frozen else batch

    @functools.cached_property
    def pattern(self) -> np.ndarray:
        """Stream of each batch: always the one that is furthest behind its share."""
        weights = np.array([weight for _, weight in self.streams])
        used, chosen = np.zeros(len(weights)), np.zeros(self.steps, np.int32)
        for number in range(self.steps):
            chosen[number] = np.argmax(weights / weights.sum() * (number + 1) - used)
            used[chosen[number]] += 1
        return chosen

    def counts(self, number: int) -> list[int]:
        """Returns each stream's batches among the first `number`; the pattern repeats beyond its end."""
        cycles, remainder = divmod(number, self.steps)
        kinds = len(self.streams)
        whole = cycles * np.bincount(self.pattern, minlength=kinds)
        return (whole + np.bincount(self.pattern[:remainder], minlength=kinds)).tolist()


@dataclasses.dataclass(frozen=True)
class DataSchedule:
    """All batches of a run by number; the last phase continues beyond its steps."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, encoded: Stream, **settings: Any) -> Self:
        """Returns the schedule of one stream without end; `settings` are a subclass's."""
        return cls((Phase(1, ((encoded, 1.0),)),), **settings)

    @functools.cached_property
    def streams(self) -> list[Stream]:
        """Returns each stream once."""
        unique = {id(encoded): encoded for phase in self.phases for encoded, _ in phase.streams}
        return list(unique.values())

    def describe(self) -> list[str]:
        lines = [line for encoded in self.streams for line in encoded.describe()]
        return [line if line.startswith(" ") else f"training data: {line}" for line in lines]

    def digest(self) -> str:
        return digest_of(self.streams)

    def shapes(self) -> list[Tree]:
        """Returns the shapes of one example of each stream, of its phase with the fewest frozen parts."""
        most: dict[int, tuple[Phase, Stream]] = {}
        for phase in sorted(self.phases, key=lambda phase: len(phase.frozen)):
            for encoded, _ in phase.streams:
                most.setdefault(id(encoded), (phase, encoded))
        batches = [phase.mark(encoded.probe()) for phase, encoded in (most[id(encoded)] for encoded in self.streams)]
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batches)

    def batch(self, number: int, *, global_batch: int, seed: int, share: slice) -> Batch:
        """Returns rows `share` of a global batch; a function of its arguments alone."""
        phase, stream, before = self._place(number)
        encoded, order = self.streams[stream], self._order(stream, seed)
        indices = [int(order[before * global_batch + row] or 0) for row in range(global_batch)[share]]
        sizes = _draw(phase, global_batch, np.random.default_rng([seed, number]))
        return phase.mark(encoded.collate(indices, sizes=sizes[share]))

    def _order(self, stream: int, seed: int) -> grain.MapDataset:
        """Returns a stream's examples without end, shuffled anew each epoch."""
        # grain shuffles epoch e with seed + e; a drawn seed keeps the epochs of two runs different.
        drawn = int(np.random.SeedSequence([seed, stream] if stream else seed).generate_state(1)[0])
        return grain.MapDataset.range(len(self.streams[stream])).shuffle(seed=drawn).repeat()

    def _place(self, number: int) -> tuple[Phase, int, int]:
        """Returns a batch's phase, its stream, and the number of that stream's earlier batches."""
        positions = {id(encoded): i for i, encoded in enumerate(self.streams)}
        used = [0] * len(self.streams)
        for phase in self.phases[:-1]:
            if number < phase.steps:
                break
            for (encoded, _), count in zip(phase.streams, phase.counts(phase.steps), strict=True):
                used[positions[id(encoded)]] += count
            number -= phase.steps
        else:
            phase = self.phases[-1]
        for (encoded, _), count in zip(phase.streams, phase.counts(number), strict=True):
            used[positions[id(encoded)]] += count
        stream = positions[id(phase.streams[phase.pattern[number % phase.steps]][0])]
        return phase, stream, used[stream]


def digest_of(streams: Sequence[Stream]) -> str:
    return content_hash([stream.digest() for stream in streams])


def _draw(phase: Phase, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns i32[b 4]: ratio, slots, width and bits of each example's message; 0: the stream's own."""
    choices = (phase.ratios or phase.slots or (0,), phase.widths or (0,), phase.bits or (0,))
    first, *others = (rng.choice(np.array(values, np.int32), count) for values in choices)
    none = np.zeros_like(first)
    return np.stack([*((first, none) if phase.ratios else (none, first)), *others], axis=1)
