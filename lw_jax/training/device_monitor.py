"""What the devices do while a run goes on: memory as JAX tells it, utilisation, temperature and power from NVML.

A thread reads the local devices once a second; each device has counters of its own. What is read is injected, so
nothing below `Devices` needs a card. Utilisation is NVML's: the share of time in which any kernel ran, which says
that a device was kept busy, not that it was used well.
"""

import collections
import ctypes
import dataclasses
import importlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from lw_jax.training.metrics import duration
from sharding.mesh import Device

UNDER_USED = 0.5  # mean utilisation below it is named; the threshold of seconds_below too
ROOM = 0.5  # peak memory below this share of the limit: the batch could grow
UNBALANCED = 0.2  # apart in mean utilisation or in peak memory, of 1
HOT_CELSIUS, HOT_UTILISATION = 80, 0.8
FEWEST_SAMPLES = 10  # a shorter run is not judged
STOP_SECONDS = 1.0  # at most waited for the thread; one that hangs in the driver ends with the process


@dataclasses.dataclass(frozen=True)
class Reading:
    """One device at one moment; None where nobody tells."""

    device: str  # platform and number over all processes: "gpu3"
    memory_bytes: int | None = None  # JAX's arrays and buffers, now
    peak_bytes: int | None = None  # the same, at most since the process began
    limit_bytes: int | None = None  # what JAX may use
    card_bytes: int | None = None  # in use on the card by every process, JAX's reserve included
    utilisation: float | None = None  # 0 to 1
    celsius: float | None = None
    watts: float | None = None


MEASURES = tuple(field.name for field in dataclasses.fields(Reading) if field.name != "device")


class Devices:
    """Reads devices of this process, one `Reading` each a call; tells once when NVML is absent or fails."""

    def __init__(self, devices: Iterable[Device], *, tell: Callable[[str], None]):
        self._devices = tuple(devices)
        self._tell = tell
        cards = [device.local_hardware_id for device in self._devices if device.platform == "gpu"]
        self._cards = open_cards(cards, tell=tell) if cards else None

    def __call__(self) -> list[Reading]:
        """Returns the devices' readings, in their order."""
        found = []
        for device in self._devices:
            memory = device.memory_stats() or {}
            found.append(
                Reading(
                    device=f"{device.platform}{device.id}",
                    memory_bytes=memory.get("bytes_in_use"),
                    peak_bytes=memory.get("peak_bytes_in_use"),
                    limit_bytes=memory.get("bytes_limit") or None,
                    **self._read_card(device.local_hardware_id),
                )
            )
        return found

    def _read_card(self, ordinal: int) -> dict[str, Any]:
        if self._cards is None or ordinal not in self._cards.handles:
            return {}
        try:
            return self._cards.read(ordinal)
        except self._cards.error as error:
            self._tell(f"utilisation is no longer read: NVML answers {error}")
            self._cards = None
            return {}


class Cards:
    """NVML's handles of CUDA devices, each found by the UUID that the CUDA driver gives for its ordinal.

    NVML counts all cards by PCI bus. CUDA counts those that CUDA_VISIBLE_DEVICES leaves to the process, in that order,
    else the fastest first, and parts of a card under MIG. The driver has applied all this and names the result.
    """

    def __init__(self, ordinals: Iterable[int], *, nvml: Any, driver: Any):
        self._nvml = nvml
        self.error: type[Exception] = nvml.NVMLError
        # Part of a card (MIG) and some boards do not tell everything; what they tell is read.
        self._untold = (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_InvalidArgument)
        self.handles = {ordinal: self._find(read_uuid(ordinal, driver=driver)) for ordinal in ordinals}

    def read(self, ordinal: int) -> dict[str, Any]:
        """Returns the measures of `Reading` that NVML tells of a card; raises `error` when it fails."""
        nvml, handle = self._nvml, self.handles[ordinal]
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return {
            "card_bytes": None if memory is None else memory.used,
            "utilisation": None if rates is None else rates.gpu / 100,
            "celsius": self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "watts": None if milliwatts is None else milliwatts / 1000,
        }

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._untold:
            return None

    def _find(self, uuid: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError_NotFound:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def open_cards(ordinals: Iterable[int], *, tell: Callable[[str], None]) -> Cards | None:
    """Returns NVML's view of CUDA devices, or tells why there is none and returns None."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        tell("no utilisation of the devices: the package nvidia-ml-py is not installed")
        return None
    try:
        nvml.nvmlInit()
        return Cards(ordinals, nvml=nvml, driver=ctypes.CDLL("libcuda.so.1"))
    except (nvml.NVMLError, OSError) as error:
        tell(f"no utilisation of the devices: {error}")
        return None


def read_uuid(ordinal: int, *, driver: Any) -> str:
    """Returns the UUID of the device that CUDA numbers so in this process; raises OSError when the driver fails."""
    device, octets = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), ordinal)),
        ("cuDeviceGetUuid_v2", (octets, device)),
    ):
        if code := getattr(driver, name)(*arguments):
            raise OSError(f"the CUDA driver answers {name} of device {ordinal} with error {code}")
    digits = bytes(octets).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


@dataclasses.dataclass
class Extent:
    """Mean, least and most of the values seen."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        """Takes one value in."""
        self.count += 1
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return self.total / self.count


@dataclasses.dataclass
class Record:
    """One device over some time; a measure that nobody told is absent."""

    samples: int = 0
    seconds_below: float = 0.0  # at less than the threshold of utilisation
    seconds_hot: float = 0.0  # above HOT_CELSIUS and HOT_UTILISATION at once
    measures: dict[str, Extent] = dataclasses.field(default_factory=dict)

    def add(self, reading: Reading, *, seconds: float, threshold: float) -> None:
        """Takes in a reading that stands for the `seconds` before it."""
        self.samples += 1
        for name in MEASURES:
            if (value := getattr(reading, name)) is not None:
                self.measures.setdefault(name, Extent()).add(value)
        if reading.utilisation is None:
            return
        self.seconds_below += seconds * (reading.utilisation < threshold)
        hot = reading.celsius is not None and reading.celsius > HOT_CELSIUS
        self.seconds_hot += seconds * (hot and reading.utilisation > HOT_UTILISATION)

    def values(self) -> dict[str, float]:
        """Returns each measure's mean; of the peak, the most."""
        return {name: extent.most if name == "peak_bytes" else extent.mean for name, extent in self.measures.items()}

    @property
    def peak_share(self) -> float | None:
        """Peak memory of the limit."""
        limit = self.measures.get("limit_bytes")
        return self.measures["peak_bytes"].most / limit.most if limit and "peak_bytes" in self.measures else None


Records = dict[str, Record]  # by device


class Sampler:
    """Reads every `period` seconds in a thread of its own while it is entered; the thread never keeps a process alive.

    Writes the mean over each `line_seconds` to `path`, one JSON line a device: 17 MB a day for eight cards.
    """

    def __init__(
        self,
        read: Callable[[], list[Reading]],
        *,
        path: Path | None = None,
        period: float = 1.0,
        line_seconds: float = 10.0,
        threshold: float = UNDER_USED,
    ):
        self._read, self._path = read, path
        self._period, self._line_seconds, self._threshold = period, line_seconds, threshold
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
        """Takes one reading of all devices; the thread calls this."""
        readings = self._read()
        now = time.monotonic()
        with self._lock:
            seconds, self._sampled, self._latest = now - self._sampled, now, readings
            for reading in readings:
                for records in (self._total, self._lap, self._line):
                    records[reading.device].add(reading, seconds=seconds, threshold=self._threshold)
            if now - self._line_started >= self._line_seconds:
                self._write_line(now)

    def restart(self) -> None:
        """Begins the totals anew, as after the step that compiles, in which the devices wait."""
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
        """Returns the newest readings for a person, over all devices: memory, utilisation, temperature and power."""
        latest, found = self._latest, []
        limit = max((reading.limit_bytes or 0 for reading in latest), default=0)
        for name, scale, unit in (
            ("memory_bytes", 1e-9, f"of {limit / 1e9:.1f} GB" if limit else "GB"),
            ("utilisation", 100, "% utilisation"),
            ("celsius", 1, "°C"),
            ("watts", 1, "W"),
        ):
            values = [getattr(reading, name) for reading in latest]
            if told := [value * scale for value in values if value is not None]:
                found.append(f"{_span(told, digits=1 if 'GB' in unit else 0)} {unit}")
        return found

    def summary(self) -> list[str]:
        """Returns one line a device that told anything, then one a finding: under-used, unbalanced, hot."""
        with self._lock:
            records = {device: record for device, record in self._total.items() if record.measures}
            lines = [f"{device}  {_describe_record(record, self._threshold)}" for device, record in records.items()]
            if records and min(record.samples for record in records.values()) < FEWEST_SAMPLES:
                return [
                    *lines,
                    f"fewer than {FEWEST_SAMPLES} samples of the devices: too short a run to judge their use",
                ]
            return lines + find_under_used(records) + find_unbalanced(records) + find_hot(records)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self.sample()

    def _write_line(self, now: float) -> None:
        seconds, self._line_started = now - self._line_started, now
        records, self._line = self._line, _no_records()
        told = [(device, record) for device, record in records.items() if record.measures]
        if self._path is None or not told:
            return
        with self._path.open("a", encoding="utf-8") as file:
            for device, record in told:
                row = {"time": round(time.time(), 3), "seconds": round(seconds, 3), "device": device}
                values = {name: round(value, 3) for name, value in record.values().items()}
                file.write(json.dumps(row | {"samples": record.samples} | values) + "\n")


def find_under_used(records: Records) -> list[str]:
    """Names the devices whose mean utilisation is below UNDER_USED, with the likely reason by their memory."""
    groups: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for device, record in records.items():
        use = record.measures.get("utilisation")
        if use is None or use.mean >= UNDER_USED:
            continue
        if record.peak_share is None:
            reason = "the host keeps it waiting (loading of data, validation) or the micro-batch is small"
        elif record.peak_share < ROOM:
            reason = f"memory never passed {_percent(ROOM)}: the micro-batch is small, a larger train.micro_batch fits"
        else:
            reason = "memory is in use: the host keeps it waiting (loading of data, validation, checkpoints)"
        groups[reason][device] = use.mean
    found = []
    for reason, group in groups.items():
        names = ", ".join(f"{device} ({_percent(use)})" for device, use in group.items())
        found.append(f"under-used: {names}; likely {reason}")
    return found


def find_unbalanced(records: Records) -> list[str]:
    """Names the two ends where mean utilisation or peak memory lie more than UNBALANCED apart."""
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
    """Names the devices that were hot under load, where a card lowers its clock."""
    return [
        f"hot: {device} spent {duration(record.seconds_hot)} above {HOT_CELSIUS} °C under load "
        f"(at most {record.measures['celsius'].most:.0f} °C); look at its cooling"
        for device, record in records.items()
        if record.seconds_hot
    ]


def _describe_record(record: Record, threshold: float) -> str:
    measures, parts = record.measures, []
    if use := measures.get("utilisation"):
        span = f"{100 * use.least:.0f} to {100 * use.most:.0f}"
        below = f"{duration(record.seconds_below)} below {_percent(threshold)}"
        parts.append(f"utilisation {_percent(use.mean)} ({span}; {below})")
    if peak := measures.get("peak_bytes"):
        limit = measures.get("limit_bytes")
        of = f" of {limit.most / 1e9:.1f} GB ({_percent(peak.most / limit.most)})" if limit else " GB"
        parts.append(f"memory at most {peak.most / 1e9:.1f}{of}")
    for name, unit in (("celsius", "°C"), ("watts", "W")):
        if extent := measures.get(name):
            parts.append(f"{extent.mean:.0f} {unit} (at most {extent.most:.0f})")
    return "  ".join(parts)


def _no_records() -> Records:
    return collections.defaultdict(Record)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _span(values: Sequence[float], *, digits: int) -> str:
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return least if least == most else f"{least} to {most}"
