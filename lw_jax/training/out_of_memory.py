"""Out-of-memory errors of the runtime, and a batch size that is halved after one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from lw_jax.core import processes
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from sharding import place
from sharding.placement import Placement

_T = TypeVar("_T")


class OutOfMemory(RuntimeError):
    """A program or its arrays do not fit on the device."""


@contextlib.contextmanager
def detect() -> Iterator[None]:
    """Converts the runtime's out-of-memory errors, and no other, into `OutOfMemory`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        raise OutOfMemory(" ".join(str(error).split())[:300]) from error


def halved(size: int, multiple: int) -> int:
    """Returns the next smaller batch to try: half of it, rounded up to a multiple of the data axis."""
    return place.round_up(size // 2, multiple)


class HalvingBatch:
    """eval.batch of a computation without side effects, halved until the computation fits into memory.

    The size that fitted is kept for the next computation. The data axis divides it.
    """

    def __init__(self, cfg: Config, placement: Placement, *, say: Callable[[str], None]):
        self.size, self._multiple, self._say = place.round_up(cfg.eval.batch, placement.data), placement.data, say

    def fit(self, largest: int) -> bool:
        """Takes what the first process found to fit, the smallest for 0; returns whether that is less.

        To be done before the start: several processes cannot agree on another size where memory runs out.
        """
        before, self.size = self.size, processes.from_first(lambda: largest or self._multiple)
        return self.size < before

    def run(self, compute: Callable[[int], _T]) -> _T:
        """Returns `compute(size)`; repeats it with half the size each time that memory runs out.

        Raises:
          OutOfMemory: the smallest size does not fit.
          UserError: one of several processes ran out of memory, and the others wait for it.
        """
        while True:
            try:
                with detect():
                    return compute(self.size)
            except OutOfMemory as error:
                if jax.process_count() > 1:
                    rule = "processes cannot agree on another one during a run; everything up to here is saved"
                    raise UserError(f"out of memory with eval.batch={self.size}: {rule}; lower it") from error
                if self.size <= self._multiple:
                    raise OutOfMemory(f"out of memory with one example per device: {error}") from error
                before, self.size = self.size, halved(self.size, self._multiple)
                self._say(f"out of memory with eval.batch={before}: now {self.size}; the metrics stay the same")
