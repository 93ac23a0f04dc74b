"""Device monitor of a run: memory from JAX, utilisation, temperature and power from NVML.

A thread reads the local devices once a second into one record each. Utilisation is NVML's: the share of time in which
any kernel ran, so a busy device need not be an efficient one.
"""

import collections
import ctypes
import dataclasses
import importlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from sharding.mesh import Device

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
        self._cards = _open_cards(ordinals, report=report) if ordinals else None

    def __call__(self) -> list[Reading]:
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


Readings = dict[str, list[Reading]]  # by device


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
        self._lap: Readings = collections.defaultdict(list)
        self._line: Readings = collections.defaultdict(list)
        self._line_started = time.monotonic()

    def __enter__(self) -> Self:
        self._line_started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        with self._lock:
            self._write_line(time.monotonic())

    def sample(self) -> None:
        readings = self._read()
        now = time.monotonic()
        with self._lock:
            self._latest = readings
            for reading in readings:
                self._lap[reading.device].append(reading)
                self._line[reading.device].append(reading)
            if now - self._line_started >= self._line_seconds:
                self._write_line(now)

    def restart(self) -> None:
        """Forgets the readings of `scalars`, as after the compiling step, in which the devices wait."""
        with self._lock:
            self._lap = collections.defaultdict(list)

    def scalars(self) -> dict[str, float]:
        """Returns "devices/MEASURE/DEVICE" since the last call: means, and the peak of memory; without its limit."""
        with self._lock:
            lap, self._lap = self._lap, collections.defaultdict(list)
        return {
            f"devices/{name}/{device}": value
            for device, readings in lap.items()
            for name, value in _means(readings).items()
            if name != "limit_bytes"
        }

    def describe(self) -> list[str]:
        latest, parts = self._latest, []
        limit = max((reading.limit_bytes or 0 for reading in latest), default=0)
        for name, scale, unit in (
            ("memory_bytes", 1e-9, f"of {limit / 1e9:.1f} GB" if limit else "GB"),
            ("utilisation", 100, "% utilisation"),
            ("celsius", 1, "°C"),
            ("watts", 1, "W"),
        ):
            values = [getattr(reading, name) for reading in latest]
            if known := [value * scale for value in values if value is not None]:
                parts.append(f"{_span(known, digits=1 if 'GB' in unit else 0)} {unit}")
        return parts

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            try:
                self.sample()
            except RuntimeError as error:  # JAX's
                return self._report(f"the devices are no longer read: {error}")

    def _write_line(self, now: float) -> None:
        seconds, self._line_started = now - self._line_started, now
        line, self._line = self._line, collections.defaultdict(list)
        measured = {device: values for device, readings in line.items() if (values := _means(readings))}
        if self._path is None or not measured:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                for device, values in measured.items():
                    row = {"time": round(time.time(), 3), "seconds": round(seconds, 3), "device": device}
                    row |= {"samples": len(line[device])} | {name: round(value, 3) for name, value in values.items()}
                    file.write(json.dumps(row) + "\n")
        except OSError as error:
            self._report(f"{self._path}: {error.strerror}: readings of the devices are no longer written")
            self._path = None


def _means(readings: Sequence[Reading]) -> dict[str, float]:
    columns = {name: [getattr(reading, name) for reading in readings] for name in MEASURES}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    return {
        name: max(values) if name == "peak_bytes" else sum(values) / len(values)
        for name, values in known.items()
        if values
    }


def _span(values: Sequence[float], *, digits: int) -> str:
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return least if least == most else f"{least} to {most}"


class _Cards:
    """NVML handles of CUDA devices, each found by the UUID that the CUDA driver gives for its ordinal.

    NVML counts all cards by PCI bus. CUDA counts those that CUDA_VISIBLE_DEVICES leaves to the process, in that order,
    else the fastest first, and MIG instances as devices. JAX (0.10) names neither UUID nor PCI bus, so the driver is
    asked: it has applied all these rules.
    """

    def __init__(self, ordinals: Iterable[int], *, nvml: Any, driver: Any):
        self._nvml = nvml
        self.error: type[Exception] = nvml.NVMLError
        # MIG instances and some boards do not have every measure; the others are read.
        self._absent = (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_InvalidArgument)
        self._handles = {ordinal: self._find(_read_uuid(ordinal, driver=driver)) for ordinal in ordinals}

    def read(self, ordinal: int) -> dict[str, Any]:
        """Returns the measures of a card by the names of `Reading`; raises `error` when NVML fails."""
        nvml, handle = self._nvml, self._handles[ordinal]
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._query(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._query(nvml.nvmlDeviceGetPowerUsage, handle)
        return {
            "card_bytes": None if memory is None else memory.used,
            "utilisation": None if rates is None else rates.gpu / 100,
            "celsius": self._query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "watts": None if milliwatts is None else milliwatts / 1000,
        }

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._absent:
            return None

    def _find(self, identifier: uuid.UUID) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identifier}")
        except self._nvml.NVMLError_NotFound:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{identifier}")


def _open_cards(ordinals: Iterable[int], *, report: Callable[[str], None]) -> _Cards | None:
    """Opens NVML for CUDA ordinals; reports why and returns None where the package, the driver or a card is absent."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        report("no utilisation of the devices: the package nvidia-ml-py is not installed")
        return None
    try:
        nvml.nvmlInit()
        return _Cards(ordinals, nvml=nvml, driver=ctypes.CDLL("libcuda.so.1"))
    except (nvml.NVMLError, OSError) as error:
        report(f"no utilisation of the devices: {error}")
        return None


def _read_uuid(ordinal: int, *, driver: Any) -> uuid.UUID:
    """Returns the UUID of a CUDA device by its ordinal in this process; raises OSError when the driver fails."""
    device, octets = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), ordinal)),
        ("cuDeviceGetUuid_v2", (octets, device)),
    ):
        if code := getattr(driver, name)(*arguments):
            raise OSError(f"the CUDA driver answers {name} of device {ordinal} with error {code}")
    return uuid.UUID(bytes=bytes(octets))
