"""Windows of a packed corpus as a stream of examples, and a data schedule with a warm-up of the inner rate."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lw_jax.core.types import Task
from lw_jax.data.batches import Batch
from lw_jax.data.corpus import Span
from lw_jax.data.data_schedule import DataSchedule, Stream

Extra = Callable[[np.ndarray], Mapping[str, np.ndarray]]  # ids i32[b L+1] -> further fields [b ...]


@dataclasses.dataclass(frozen=True)
class Windows(Stream):
    """All windows of `length` inputs and as many targets in a span; window i begins at token i * length of it.

    Neighbours share one token, the last target of one and first input of the next. Without padding and messages.
    """

    span: Span
    length: int
    name: str  # the model that a batch is for
    extra: Extra | None = None
    measure: bool = False  # the Task of every batch: a separate program with more measurements
    task: str = "text"

    def __len__(self) -> int:
        return (len(self.span) - 1) // self.length

    def collate(self, indices: Sequence[int], *, sizes: np.ndarray | None = None) -> Batch:
        """Returns ids i32[b L+1], weights f32[b 1], rate f32[b], task, the extra fields, and index i32[b]."""
        starts = [self.span.start + index * self.length for index in indices]
        ids = self.span.corpus.rows(starts, self.length + 1)
        fields = {
            "ids": ids,
            "weights": np.ones((len(ids), 1), np.float32),
            "rate": np.ones(len(ids), np.float32),
            "task": Task("measure" if self.measure else "train"),
            **(self.extra(ids) if self.extra else {}),
        }
        return {"source": {}, "readers": {self.name: fields}, "index": np.array(indices, np.int32)}

    def digest(self) -> str:
        return f"{self.span.corpus.folder.name} {self.span.start} {self.span.stop} {self.length}"

    def describe(self) -> list[str]:
        unused = len(self.span) - 1 - len(self) * self.length
        tail = f", {unused} tokens at the end not used" if unused else ""
        tail += f"; {self.span.corpus.blank:,} documents without text left out" if self.span.corpus.blank else ""
        return [
            f"{len(self):,} windows of {self.length:,} tokens: tokens {self.span.start:,} to {self.span.stop:,} of the "
            f"{self.span.corpus.tokens:,} in {self.span.corpus.source}{tail}"
        ]


@dataclasses.dataclass(frozen=True)
class WarmupSchedule(DataSchedule):
    """A schedule whose batches hold every row's "rate": linear from `start` to 1 at batch number `warmup`."""

    warmup: int = 0  # batches; 0: always 1
    start: float = 1.0

    def rate(self, number: int) -> float:
        return self.start + min(1.0, number / self.warmup) * (1.0 - self.start) if self.warmup else 1.0

    def batch(self, number: int, *, global_batch: int, seed: int, share: slice) -> Batch:
        """Returns rows `share` of a global batch; a function of its arguments alone."""
        batch = super().batch(number, global_batch=global_batch, seed=seed, share=share)
        for fields in batch["readers"].values():
            fields["rate"] = np.full_like(fields["rate"], self.rate(number))
        return batch
