"""Metrics as JSON lines and as TensorBoard's event files, one row a logged step; the same whatever the recipe."""

import contextlib
import json
import math
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from google.protobuf.message import DecodeError
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from lw_jax.core.files import whole, write_whole
from lw_jax.training.run_folder import read_metrics


class MetricsLog:
    """Appends to `metrics.jsonl`; on a resumed run, rows beyond the step taken up are dropped first.

    `revalidate` drops that step's validation too. The file is replaced as a whole, a link by a file of the run's own.
    """

    def __init__(self, path: Path, *, resumed_step: int = 0, revalidate: bool = False):
        self.path = path
        rows = read(path) if resumed_step and path.exists() else []
        kept = [row for row in rows if _is_kept(row["step"], row.keys(), resumed_step, revalidate)]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Appends one line at once, so that a killed run keeps what it logged."""
        row = {"step": step} | {
            key: value if math.isfinite(value) else str(value) for key, value in values.items()
        }  # JSON has no NaN
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file, each with its "step"; see `workdir.read_rows`."""
    return read_metrics(path)


def _is_kept(step: int, names: Iterable[str], resumed_step: int, revalidate: bool) -> bool:
    validates = any(name.startswith("validation/") for name in names)
    return step < resumed_step or (step == resumed_step and not (revalidate and validates))


class TensorBoard:
    """Writes the same rows as event files; on a resumed run, events beyond the step taken up are removed first.

    They are removed from the files, because TensorBoard's data server (0.7.2) passes over the purge mark that
    tensorboardX's `purge_step` writes and goes on showing them. Each row is written at once, without the thread and
    the queue of tensorboardX's SummaryWriter, so that a killed run keeps what it logged.
    """

    def __init__(self, folder: Path, *, resumed_step: int = 0, revalidate: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("events.out.tfevents.*"):
            kept = _keep_events(file.read_bytes(), resumed_step=resumed_step, revalidate=revalidate)
            with whole(file) as partial:
                partial.write_bytes(kept)
        # EventsWriter names a file by the second and overwrites a file of that name.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self._writer.close()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Appends one event with all values at once."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()


def _keep_events(data: bytes, *, resumed_step: int, revalidate: bool) -> bytes:
    """Returns the records of an event file up to a step, without what a crash has cut or damaged.

    A record is TensorFlow's TFRecord: u64 length, u32 CRC of it, the event, u32 CRC of that.
    """
    kept, start = [], 0
    while start + 12 <= len(data):
        end = start + 16 + struct.unpack_from("<Q", data, start)[0]
        if end > len(data):
            break
        try:
            event = Event.FromString(data[start + 12 : end - 4])
        except DecodeError:
            break
        names = [value.tag for value in event.summary.value]
        if event.step == 0 or _is_kept(event.step, names, resumed_step, revalidate):  # 0: the file's version
            kept.append(data[start:end])
        start = end
    return b"".join(kept)


class Clock:
    """Seconds per step and time left, without the first step, which compiles."""

    def __init__(self, first_step: int, last_step: int):
        self.last_step = last_step
        self.started = self.marked = time.monotonic()
        self.base_step = self.marked_step = first_step

    def compiled(self, step: int) -> float:
        """Restarts the count after the compiling step and returns its seconds."""
        now = time.monotonic()
        seconds, self.started, self.marked, self.base_step, self.marked_step = now - self.started, now, now, step, step
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what is no step, such as a validation; the devices must have finished the steps before it."""
        begun = time.monotonic()
        yield
        passed = time.monotonic() - begun
        self.started, self.marked = self.started + passed, self.marked + passed

    def lap(self, step: int) -> tuple[float, float]:
        """Returns (seconds per step since the last lap, seconds left at the average pace); NaN where no step passed.

        A lap without steps does not count as one: the seconds since the last lap go to the next.
        """
        now = time.monotonic()
        if step == self.marked_step:
            pace = math.nan
        else:
            pace = (now - self.marked) / (step - self.marked_step)
            self.marked, self.marked_step = now, step
        done = step - self.base_step
        return pace, (now - self.started) / done * (self.last_step - step) if done else math.nan


def duration(seconds: float) -> str:
    """Returns "2h 05m", "3m 20s" or "12s", and "-" for NaN, which is how `Clock` says that nothing was measured."""
    if math.isnan(seconds):
        return "-"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"
