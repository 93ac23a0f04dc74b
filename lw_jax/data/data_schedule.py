"""Data schedule of a run: phases of batches, each a mixture of encoded streams, with drawn message shapes."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import grain
import jax
import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.types import EXACT, Frozen, Tree
from lw_jax.data.batches import Batch, beside


class Stream(Protocol):
    """A tokenised data set; where nothing else is said, one without messages."""

    @property
    def task(self) -> str:
        """Name of the task of its batches."""
        ...

    @property
    def slots(self) -> int:
        """Most slots of a message; 0 without messages."""
        return 0

    @property
    def width(self) -> int:
        """Values of a latent; 0 without messages."""
        return 0

    def count_slots(self, indices: Sequence[int], ratio: np.ndarray | None = None) -> np.ndarray:
        """Returns i32[b]: the slots of each example's message at each's source tokens a slot; None: as validated."""
        del ratio
        return np.zeros(len(indices), np.int32)

    def __len__(self) -> int:
        """Counts the examples."""
        ...

    def collate(self, indices: Sequence[int], *, channel: np.ndarray | None = None) -> Batch:
        """Returns a batch of the examples at those positions; `channel` i32[b 3] holds each one's message shape."""
        ...

    def digest(self) -> str:
        """Identifies the content of all examples, in their order."""
        ...

    def probe(self) -> Batch:
        """Returns a batch of one example for its shapes and types."""
        ...

    def describe(self) -> list[str]:
        """Returns lines for people."""
        ...


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
    dropout: float = 0.0  # share of the examples without their literals, and as large a one without their latents

    all_sizes: bool = False  # each example in all of `slots` or `ratios` instead of one that is drawn

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
        cycles, rest = divmod(number, self.steps)
        kinds = len(self.streams)
        whole = cycles * np.bincount(self.pattern, minlength=kinds)
        return (whole + np.bincount(self.pattern[:rest], minlength=kinds)).tolist()


@dataclasses.dataclass(frozen=True)
class DataSchedule:
    """All batches of a run by number; the last phase continues beyond its steps."""

    phases: tuple[Phase, ...]

    @staticmethod
    def of(encoded: Stream) -> "DataSchedule":
        """Returns the schedule of one stream."""
        return DataSchedule((Phase(1, ((encoded, 1.0),)),))

    @functools.cached_property
    def streams(self) -> list[Stream]:
        """Returns each stream once."""
        found = {id(encoded): encoded for phase in self.phases for encoded, _ in phase.streams}
        return list(found.values())

    def describe(self) -> list[str]:
        """Returns report lines."""
        lines = [line for encoded in self.streams for line in encoded.describe()]
        return [line if line.startswith(" ") else f"training data: {line}" for line in lines]

    def sizes(self) -> list[int]:
        """Returns the number of examples of each stream."""
        return [len(encoded) for encoded in self.streams]

    def digest(self) -> str:
        """Identifies the content of all streams."""
        return digest_of(self.streams)

    def shapes(self) -> list[Batch]:
        """Returns a batch of one example of each stream, of the phase with the fewest frozen parts."""
        most: dict[int, tuple[Phase, Stream]] = {}
        for phase in sorted(self.phases, key=lambda phase: len(phase.frozen)):
            for encoded, _ in phase.streams:
                most.setdefault(id(encoded), (phase, encoded))
        found = (most[id(encoded)] for encoded in self.streams)
        rng = np.random.default_rng(0)  # of no account: the shapes are the same
        return [phase.mark(_send(phase, encoded.probe(), _draw(phase, encoded, [0], rng))) for phase, encoded in found]

    def batch(self, number: int, *, global_batch: int, seed: int, share: slice) -> Batch:
        """Returns rows `share` of a global batch; a function of its arguments alone."""
        phase, stream, before = self._place(number)
        encoded, order = self.streams[stream], self._order(stream, seed)
        indices = [int(order[before * global_batch + row] or 0) for row in range(global_batch)]
        channel = _draw(phase, encoded, indices, np.random.default_rng([seed, number]))
        own = None if channel is None else channel[share]
        batch = encoded.collate(indices[share], channel=None if own is None else own[:, 0])
        batch = _send(phase, batch, own)
        if phase.dropout:
            batch = drop(batch, np.random.default_rng([seed, number, 1]).random(global_batch)[share], phase.dropout)
        return phase.mark(batch)

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
    """Identifies the content of several streams."""
    return hashlib.blake2b("\n".join(one.digest() for one in streams).encode(), digest_size=16).hexdigest()


def drop(batch: Batch, draws: np.ndarray, dropout: float) -> Batch:
    """Returns a batch in which readers miss the literals of some examples and the latents of others.

    `draws` f64[b] from 0 to 1: below `dropout` an example has no literals, from 1 - dropout on no latents.
    """
    readers = {}
    for name, fields in batch["readers"].items():
        if "literals" in fields:
            words, channel = fields["literals"], fields["channel"].copy()
            channel[draws >= 1 - dropout, ..., 0] = 0
            words = words | {"mask": words["mask"] & beside(draws >= dropout, words["mask"])}
            fields = fields | {"literals": words, "channel": channel}
        readers[name] = fields
    return batch | {"readers": readers}


def refuse_small(data_schedule: DataSchedule, global_batch: int) -> None:
    """Raises UserError where a stream has fewer examples than one global batch."""
    for encoded in data_schedule.streams:
        if len(encoded) < global_batch:
            raise UserError(
                f"config.data.train gives {len(encoded)} usable examples ({encoded.task}), fewer than one global batch "
                f"(config.train.global_batch={global_batch}); give more data or a smaller batch"
            )


def example_shapes(batch: Batch) -> Tree:
    """Returns one example's shapes, without the batch axis."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def _draw(phase: Phase, encoded: Stream, indices: Sequence[int], rng: np.random.Generator) -> np.ndarray | None:
    """Returns i32[b n 3]: slots, width and bits of the n messages of the example at each of `indices`.

    None without messages.
    """
    if not encoded.slots:
        return None
    sizes = phase.ratios or phase.slots or (0,)
    shape = (len(indices), len(sizes) if phase.all_sizes else 1)
    choices = (sizes, phase.widths or (encoded.width,), phase.bits or (EXACT,))
    drawn = np.stack([rng.choice(np.array(values, np.int32), shape) for values in choices], axis=2)
    if phase.all_sizes:
        drawn[:, :, 0] = sizes
    if not phase.slots:
        for number in range(shape[1]):
            drawn[:, number, 0] = encoded.count_slots(indices, drawn[:, number, 0] if phase.ratios else None)
    return drawn


def _send(phase: Phase, batch: Batch, channel: np.ndarray | None) -> Batch:
    """Returns the batch with every example sent in all its sizes, where the phase wants that: `channel` i32[b n 3].

    The source's "channel" is [b n 3]; the readers' leaves are [b n ...].
    """
    if channel is None or not phase.all_sizes:
        return batch

    def repeat(fields: Batch) -> Batch:
        leaves = jax.tree.map(lambda leaf: np.stack([leaf] * channel.shape[1], axis=1), fields)
        return leaves | {"channel": channel}

    readers = {name: repeat(fields) for name, fields in batch["readers"].items()}
    return batch | {"source": batch["source"] | {"channel": channel}, "readers": readers}
