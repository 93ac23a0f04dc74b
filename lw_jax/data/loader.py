"""Endless shuffled training batches and ordered evaluation batches over an encoded data set.

The order is a function of the seed alone: not of the number of processes, threads or earlier runs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from lw_jax.core.errors import UserError
from lw_jax.core.types import TASKS
from lw_jax.data.batches import Batch
from lw_jax.data.data_schedule import DataSchedule, Stream
from lw_jax.data.examples import spread

FOREVER = 1 << 40  # batches, more than any run takes
_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # batches; padding ids is cheap beside a train step


class Loader:
    """An iterator over one process's share of every global batch of a data schedule.

    `share` is the process's number and how many there are. The shares of all processes, concatenated in their order,
    are the batch that one process alone would see; their lengths differ by one at most. Raises UserError when a stream
    is smaller than a global batch, or the batch smaller than the number of processes.
    """

    def __init__(
        self, data_schedule: DataSchedule, *, global_batch: int, seed: int, share: tuple[int, int] = (0, 1)
    ) -> None:
        for stream in data_schedule.streams:
            if len(stream) < global_batch:
                raise UserError(
                    f"config.data.train{' or data.passages' * (stream.task in TASKS[1:])} gives {len(stream)} usable "
                    f"examples ({stream.task}), fewer than one global batch "
                    f"(config.train.global_batch={global_batch}); give more data or a smaller batch"
                )
        process, count = share
        if global_batch < count:
            rule = f"must be at least the number of processes, {count}; start fewer, or raise it"
            raise UserError(f"config.train.global_batch={global_batch}: {rule}")
        rows = slice(global_batch * process // count, global_batch * (process + 1) // count)
        self._identity = {"examples": list(map(len, data_schedule.streams)), "global_batch": global_batch, "seed": seed}
        self._batches = iter(
            grain.MapDataset.range(FOREVER)
            .map(lambda number: data_schedule.batch(number, global_batch=global_batch, seed=seed, share=rows))
            .to_iter_dataset(_READ)
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        """Returns the position of the next batch as JSON values; the same in every process."""
        return {**self._identity, "iterator": self._batches.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues at a position of `state`. Raises UserError when it belongs to other data, batch or seed."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise UserError(
                    f"the checkpoint's data state has {key}={state.get(key)!r}, this run {value!r}: its order cannot "
                    "be continued; restore the old configuration, or start in a new workdir"
                )
        self._batches.set_state(state["iterator"])


def eval_batches(encoded: Stream, batch: int, limit: int = 0, *, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
    """Yields the examples in order, as `batches_of`; with a limit, that many spread evenly over the data set."""
    for collated in batches_of(encoded, spread(len(encoded), limit), batch, share=share):
        yield {key: value for key, value in collated.items() if key != "position"}


def batches_of(
    encoded: Stream, indices: Sequence[int], batch: int, *, share: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """Yields the examples at `indices`, with "valid" bool[b] and "position" i32[b], their places in `indices`.

    The last batch is filled by repeating its last example. Of several processes, `share` is this one's number and how
    many there are: it gets its rows of each batch, which they divide.
    """
    number, count = share
    if batch % count:
        raise UserError(f"config.eval.batch={batch} does not divide by {count} processes")
    local_rows = slice(number * batch // count, (number + 1) * batch // count)
    for start in range(0, len(indices), batch):
        places = np.minimum(np.arange(start, start + batch), len(indices) - 1)[local_rows]
        valid = np.arange(start, start + batch)[local_rows] < len(indices)
        yield {**encoded.collate([indices[i] for i in places]), "valid": valid, "position": places.astype(np.int32)}
