"""Device monitor of a run: memory from JAX, utilisation, temperature and power from NVML.

A thread reads the local devices once a second into one record each. Utilisation is NVML's: the share of time in which
any kernel ran, so a busy device need not be an efficient one.
"""

import collections
import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from lw_jax.core.progress import duration
from lw_jax.training import nvml
from sharding.mesh import Device

UNDER_USED = 0.5  # mean utilisation below it is a finding
LOW_MEMORY = 0.5  # peak memory below this share of the limit: the micro-batch could grow
UNBALANCED = 0.2  # difference of mean utilisation or peak memory between devices
HOT_CELSIUS, HOT_UTILISATION = 80, 0.8
MIN_SAMPLES = 10  # no findings about a shorter run
STOP_SECONDS = 1.0  # longest wait for the thread; one that hangs in the driver ends with the process


@dataclasses.dataclass(frozen=True)
class Reading:
    """One device at one moment; None: not known."""

    device: str  # platform and number over all processes: "gpu3"
    memory_bytes: int | None = None  # JAX's arrays and buffers
    peak_bytes: int | None = None  # their maximum since the process began
    limit_bytes: int | None = None  # of JAX's allocator
    card_bytes: int | None = None  # in use by all processes, JAX's reserve included
    utilisation: float | None = None  # 0 to 1
    celsius: float | None = None
    watts: float | None = None


MEASURES = tuple(field.name for field in dataclasses.fields(Reading) if field.name != "device")


class Devices:
    """Reader of this process's devices, one `Reading` each a call; reports once that NVML is absent or has failed."""

    def __init__(self, devices: Iterable[Device], report: Callable[[str], None]):
        self._devices, self._report = tuple(devices), report
        ordinals = [device.local_hardware_id for device in self._devices if device.platform == "gpu"]
        self._cards = nvml.open_cards(ordinals, report=report) if ordinals else None

    def __call__(self) -> list[Reading]:
        """Returns the devices' readings, in their order."""
        return [self._read(device) for device in self._devices]

    def _read(self, device: Device) -> Reading:
        memory = device.memory_stats() or {}
        return Reading(
            device=f"{device.platform}{device.id}",
            memory_bytes=memory.get("bytes_in_use"),
            peak_bytes=memory.get("peak_bytes_in_use"),
            limit_bytes=memory.get("bytes_limit") or None,
            **self._read_card(device),
        )

    def _read_card(self, device: Device) -> dict[str, Any]:
        if self._cards is None or device.platform != "gpu":
            return {}
        try:
            return self._cards.read(device.local_hardware_id)
        except self._cards.error as error:
            self._report(f"utilisation is no longer read: NVML answers {error}")
            self._cards = None
            return {}


@dataclasses.dataclass
class Statistic:
    """Running mean, minimum and maximum."""

    count: int = 0
    total: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    def add(self, value: float) -> None:
        """Adds one value."""
        self.count += 1
        self.total += value
        self.minimum, self.maximum = min(self.minimum, value), max(self.maximum, value)

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return self.total / self.count


@dataclasses.dataclass
class Record:
    """Statistics of one device over some time; an unknown measure is absent."""

    samples: int = 0
    seconds_below: float = 0.0  # utilisation UNDER_USED
    seconds_hot: float = 0.0  # above HOT_CELSIUS and HOT_UTILISATION at once
    measures: dict[str, Statistic] = dataclasses.field(default_factory=dict)

    def add(self, reading: Reading, *, seconds: float) -> None:
        """Adds a reading, weighted by the `seconds` before it."""
        self.samples += 1
        for name in MEASURES:
            if (value := getattr(reading, name)) is not None:
                self.measures.setdefault(name, Statistic()).add(value)
        if reading.utilisation is None:
            return
        self.seconds_below += seconds * (reading.utilisation < UNDER_USED)
        hot = reading.celsius is not None and reading.celsius > HOT_CELSIUS
        self.seconds_hot += seconds * (hot and reading.utilisation > HOT_UTILISATION)

    def values(self) -> dict[str, float]:
        """Returns each measure's mean; of the peak, the maximum."""
        return {name: one.maximum if name == "peak_bytes" else one.mean for name, one in self.measures.items()}

    @property
    def peak_share(self) -> float | None:
        """Peak memory as a share of the limit; None: not known."""
        limit = self.measures.get("limit_bytes")
        return self.measures["peak_bytes"].maximum / limit.maximum if limit and "peak_bytes" in self.measures else None


Records = dict[str, Record]  # by device


class Sampler:
    """Daemon thread that reads the devices every `period` seconds while the context is open.

    Writes the mean over each `line_seconds` to `path`, one JSON line a device: 17 MB a day for eight cards. Where the
    file cannot be written or the runtime fails, it reports so once and ends: what it does decides nothing.
    """

    def __init__(
        self,
        read: Callable[[], list[Reading]],
        *,
        path: Path | None = None,
        period: float = 1.0,
        line_seconds: float = 10.0,
        report: Callable[[str], None] = print,
    ):
        self._read, self._path, self._report = read, path, report
        self._period, self._line_seconds = period, line_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)
        self._latest: list[Reading] = []
        self._total, self._lap, self._line = (_no_records() for _ in range(3))
        self._sampled = self._line_started = time.monotonic()

    def __enter__(self) -> Self:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread and writes the last line."""
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        with self._lock:
            self._write_line(time.monotonic())

    def sample(self) -> None:
        """Reads all devices once; the thread calls this."""
        readings = self._read()
        now = time.monotonic()
        with self._lock:
            seconds, self._sampled, self._latest = now - self._sampled, now, readings
            for reading in readings:
                for records in (self._total, self._lap, self._line):
                    records[reading.device].add(reading, seconds=seconds)
            if now - self._line_started >= self._line_seconds:
                self._write_line(now)

    def restart(self) -> None:
        """Resets the totals, as after the compiling step, in which the devices wait."""
        with self._lock:
            self._total, self._lap = _no_records(), _no_records()

    def scalars(self) -> dict[str, float]:
        """Returns "devices/MEASURE/DEVICE" since the last call: means, and the peak of memory; without its limit."""
        with self._lock:
            records, self._lap = self._lap, _no_records()
        return {
            f"devices/{name}/{device}": value
            for device, record in records.items()
            for name, value in record.values().items()
            if name != "limit_bytes"
        }

    def describe(self) -> list[str]:
        """Returns the newest readings over all devices as texts: memory, utilisation, temperature and power."""
        latest, found = self._latest, []
        limit = max((reading.limit_bytes or 0 for reading in latest), default=0)
        for name, scale, unit in (
            ("memory_bytes", 1e-9, f"of {limit / 1e9:.1f} GB" if limit else "GB"),
            ("utilisation", 100, "% utilisation"),
            ("celsius", 1, "°C"),
            ("watts", 1, "W"),
        ):
            values = [getattr(reading, name) for reading in latest]
            if known := [value * scale for value in values if value is not None]:
                found.append(f"{_span(known, digits=1 if 'GB' in unit else 0)} {unit}")
        return found

    def summary(self) -> list[str]:
        """Returns one line for each device with any measure, then one a finding: under-used, unbalanced, hot."""
        with self._lock:
            records = {device: record for device, record in self._total.items() if record.measures}
            lines = [f"{device}  {_describe_record(record)}" for device, record in records.items()]
            if records and min(record.samples for record in records.values()) < MIN_SAMPLES:
                return [*lines, f"fewer than {MIN_SAMPLES} samples of the devices: too short a run to judge their use"]
            return lines + find_under_used(records) + find_unbalanced(records) + find_hot(records)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            try:
                self.sample()
            except RuntimeError as error:  # JAX's
                return self._report(f"the devices are no longer read: {error}")

    def _write_line(self, now: float) -> None:
        seconds, self._line_started = now - self._line_started, now
        records, self._line = self._line, _no_records()
        measured = [(device, record) for device, record in records.items() if record.measures]
        if self._path is None or not measured:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                for device, record in measured:
                    row = {"time": round(time.time(), 3), "seconds": round(seconds, 3), "device": device}
                    values = {name: round(value, 3) for name, value in record.values().items()}
                    file.write(json.dumps(row | {"samples": record.samples} | values) + "\n")
        except OSError as error:
            self._report(f"{self._path}: {error.strerror}: readings of the devices are no longer written")
            self._path = None


def find_under_used(records: Records) -> list[str]:
    """Lists devices whose mean utilisation is below UNDER_USED, with the likely reason by their memory."""
    groups: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for device, record in records.items():
        use = record.measures.get("utilisation")
        if use is None or use.mean >= UNDER_USED:
            continue
        if record.peak_share is None:
            reason = "the host keeps it waiting (loading of data, validation) or the micro-batch is small"
        elif record.peak_share < LOW_MEMORY:
            low = f"memory never passed {_percent(LOW_MEMORY)}"
            reason = f"{low}: the micro-batch is small, a larger train.micro_batch fits"
        else:
            reason = "memory is in use: the host keeps it waiting (loading of data, validation, checkpoints)"
        groups[reason][device] = use.mean
    found = []
    for reason, group in groups.items():
        names = ", ".join(f"{device} ({_percent(use)})" for device, use in group.items())
        found.append(f"under-used: {names}; likely {reason}")
    return found


def find_unbalanced(records: Records) -> list[str]:
    """Lists minimum and maximum where mean utilisation or peak memory differ by more than UNBALANCED."""
    use = {d: r.measures["utilisation"].mean for d, r in records.items() if "utilisation" in r.measures}
    peak = {d: r.peak_share for d, r in records.items() if r.peak_share is not None}
    found = []
    for what, shares in (("mean utilisation", use), ("peak memory", peak)):
        if not shares:
            continue
        least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        if shares[most] - shares[least] > UNBALANCED:
            ends = f"{least} {_percent(shares[least])}, {most} {_percent(shares[most])}"
            found.append(f"unbalanced: {what} is {ends}, more than {round(100 * UNBALANCED)} points apart")
    return found


def find_hot(records: Records) -> list[str]:
    """Lists devices that were hot under load, where a card lowers its clock."""
    return [
        f"hot: {device} spent {duration(record.seconds_hot)} above {HOT_CELSIUS} °C under load "
        f"(at most {record.measures['celsius'].maximum:.0f} °C); look at its cooling"
        for device, record in records.items()
        if record.seconds_hot
    ]


def _describe_record(record: Record) -> str:
    measures, parts = record.measures, []
    if use := measures.get("utilisation"):
        span = f"{100 * use.minimum:.0f} to {100 * use.maximum:.0f}"
        below = f"{duration(record.seconds_below)} below {_percent(UNDER_USED)}"
        parts.append(f"utilisation {_percent(use.mean)} ({span}; {below})")
    if peak := measures.get("peak_bytes"):
        limit = measures.get("limit_bytes")
        of = f" of {limit.maximum / 1e9:.1f} GB ({_percent(peak.maximum / limit.maximum)})" if limit else " GB"
        parts.append(f"memory at most {peak.maximum / 1e9:.1f}{of}")
    for name, unit in (("celsius", "°C"), ("watts", "W")):
        if statistic := measures.get(name):
            parts.append(f"{statistic.mean:.0f} {unit} (at most {statistic.maximum:.0f})")
    return "  ".join(parts)


def _no_records() -> Records:
    return collections.defaultdict(Record)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _span(values: Sequence[float], *, digits: int) -> str:
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return least if least == most else f"{least} to {most}"
