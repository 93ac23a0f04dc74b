"""Device monitor: one record a device, its card found by UUID, and no NVML fault stops the run."""

import ctypes
import itertools
import json
import sys
import threading
import time
import types
from collections.abc import Callable

import jax
import pytest

from lw_jax.training import device_monitor
from lw_jax.training.device_monitor import Reading, Sampler

GB = 10**9


def script(*steps: list[Reading]) -> Callable[[], list[Reading]]:
    """Plays readings back, one list a call, the last for ever."""
    return itertools.chain(steps, itertools.repeat(steps[-1])).__next__


@pytest.fixture
def now(monkeypatch):
    """A clock that tests move by hand."""
    moment = [1000.0]
    monkeypatch.setattr(device_monitor.time, "monotonic", lambda: moment[0])
    return moment


def play(sampler: Sampler, now: list[float], *seconds: float) -> Sampler:
    for passed in seconds:
        now[0] += passed
        sampler.sample()
    return sampler


def busy(device: str, utilisation: float, *, peak: int = 60) -> Reading:
    memory = {"memory_bytes": peak * GB, "peak_bytes": peak * GB, "limit_bytes": 80 * GB}
    return Reading(device, utilisation=utilisation, celsius=55, watts=300, **memory)


# The sampler


def test_scalars_are_means_of_each_device_since_the_last_call(now):
    read = script(
        [busy("gpu0", 0.0)],
        [busy("gpu0", 0.5, peak=10), busy("gpu5", 0.1)],
        [busy("gpu0", 0.9, peak=30), busy("gpu5", 0.3)],
        [busy("gpu0", 0.2, peak=30)],
    )
    sampler = play(Sampler(read), now, 40)
    sampler.restart()  # behind the step that compiles
    found = play(sampler, now, 1, 1).scalars()
    assert found["devices/utilisation/gpu0"] == pytest.approx(0.7)
    assert found["devices/utilisation/gpu5"] == pytest.approx(0.2)
    assert found["devices/memory_bytes/gpu0"] == 20 * GB
    assert found["devices/peak_bytes/gpu0"] == 30 * GB, "a peak is not averaged"
    assert "devices/limit_bytes/gpu0" not in found, "it is the same in every row"
    assert play(sampler, now, 1).scalars()["devices/utilisation/gpu0"] == 0.2
    assert sampler.scalars() == {}, "nothing was sampled since"


def test_lines_are_written_at_intervals_and_at_the_end(now, tmp_path):
    path = tmp_path / "devices.jsonl"
    steps = [[busy("gpu0", step / 10), busy("gpu1", 1 - step / 10, peak=step)] for step in range(1, 8)]
    made = Sampler(script(*steps), path=path, period=600, line_seconds=5)
    now[0] += 30  # weights are loaded
    with made as sampler:
        play(sampler, now, 2, 2)
        assert not path.exists()
        play(sampler, now, 2, 1, 1)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(row["device"], row["samples"], row["seconds"]) for row in rows]
    assert found == [("gpu0", 3, 6), ("gpu1", 3, 6), ("gpu0", 2, 2), ("gpu1", 2, 2)]
    assert [row["utilisation"] for row in rows[::2]] == pytest.approx([0.2, 0.45])
    assert (rows[1]["peak_bytes"], rows[1]["memory_bytes"]) == (3 * GB, 2 * GB)


def test_full_disk_and_failing_runtime_are_said_once_and_end_no_run(now, tmp_path):
    path, told = tmp_path / "devices.jsonl", []
    path.symlink_to("/dev/full")
    with Sampler(script([busy("gpu0", 0.5)]), path=path, period=600, line_seconds=1, report=told.append) as sampler:
        play(sampler, now, 2, 2)
        assert sampler.scalars()["devices/utilisation/gpu0"] == 0.5
    assert len(told) == 1 and f"{path}: No space left on device" in told[0]

    def read() -> list[Reading]:
        raise jax.errors.JaxRuntimeError("INTERNAL: lost")

    failed = threading.Event()
    with Sampler(read, period=0.01, report=lambda line: (told.append(line), failed.set())):
        assert failed.wait(10)
    assert len(told) == 2 and "INTERNAL: lost" in told[1]


def test_thread_samples_by_itself_and_a_driver_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(device_monitor, "STOP_SECONDS", 0.1)
    entered, release = threading.Event(), threading.Event()

    def read() -> list[Reading]:
        entered.set()
        release.wait(10)
        return []

    with Sampler(read, period=0.01) as sampler:
        assert entered.wait(10)
        assert sampler.scalars() == {}, "what is asked meanwhile is answered"
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    release.set()


# The cards


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    """NotSupported, NoPermission and InvalidArgument: a measure that this card does not have."""


class NotFound(NVMLError):
    pass


class Board:
    """Fake of pynvml: cards by UUID, each with its percent of utilisation."""

    NVMLError, NVMLError_NotFound = NVMLError, NotFound
    NVMLError_NotSupported = NVMLError_NoPermission = NVMLError_InvalidArgument = NotSupported
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, cards: dict[str, int], *, start: Exception | None = None):
        self.cards, self.start, self.failure = cards, start, None

    def nvmlInit(self) -> None:
        if self.start:
            raise self.start

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.cards:
            raise NotFound(uuid)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> types.SimpleNamespace:
        if self.failure:
            raise self.failure
        if handle.startswith("MIG-"):
            raise NotSupported("Not Supported")
        return types.SimpleNamespace(gpu=self.cards[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=self.cards[handle] * GB)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 40 + sensor

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 312500  # milliwatts


class Driver:
    """Fake of libcuda: gives the last octet of the UUID of each device that the process may see."""

    def __init__(self, *visible: int):
        self.visible = visible

    def cuInit(self, flags: int) -> int:
        return flags

    def cuDeviceGet(self, device, ordinal: int) -> int:
        if ordinal >= len(self.visible):
            return 101  # CUDA_ERROR_INVALID_DEVICE
        device._obj.value = self.visible[ordinal]
        return 0

    def cuDeviceGetUuid_v2(self, octets, device) -> int:
        octets[:] = [*range(15), device.value]
        return 0


def uuid(last: int) -> str:
    return f"00010203-0405-0607-0809-0a0b0c0d0e{last:02x}"


class Card:
    """Fake of a jax.Device."""

    def __init__(self, number: int, ordinal: int, *, platform: str = "gpu", memory: dict[str, int] | None = None):
        self.id, self.local_hardware_id, self.platform, self._memory = number, ordinal, platform, memory

    def memory_stats(self) -> dict[str, int] | None:
        return self._memory


@pytest.fixture
def machine(monkeypatch):
    def build(board: Board | None, driver: Driver) -> list[str]:
        monkeypatch.setitem(sys.modules, "pynvml", board)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        return []

    return build


def test_card_or_its_part_is_found_by_the_drivers_uuid(machine):
    # CUDA_VISIBLE_DEVICES=2,1 of four cards: ordinal 0 is the third card for NVML, ordinal 1 its second.
    cards = {f"GPU-{uuid(card)}": 10 * card for card in range(4)} | {f"MIG-{uuid(7)}": 30}
    reported = machine(Board(cards), Driver(2, 1, 7))
    memory = {"bytes_in_use": 3, "peak_bytes_in_use": 5, "bytes_limit": 7, "largest_alloc_size": 2}
    # The second process of a node: JAX's numbers go on, the driver's begin at 0.
    read = device_monitor.Devices([Card(8, 0, memory=memory), Card(9, 1), Card(10, 2)], reported.append)
    assert read() == [
        Reading("gpu8", 3, 5, 7, card_bytes=20 * GB, utilisation=0.2, celsius=40, watts=312.5),
        Reading("gpu9", card_bytes=10 * GB, utilisation=0.1, celsius=40, watts=312.5),
        Reading("gpu10", card_bytes=30 * GB, celsius=40, watts=312.5),  # a MIG instance has no utilisation
    ]
    assert reported == []


@pytest.mark.parametrize(
    ("board", "driver", "line"),
    [
        (None, Driver(1), "nvidia-ml-py is not installed"),
        (Board({}, start=NVMLError("Driver Not Loaded")), Driver(1), "Driver Not Loaded"),
        (Board({f"GPU-{uuid(2)}": 20}), Driver(1), f"MIG-{uuid(1)}"),
        (Board({f"GPU-{uuid(1)}": 20}), Driver(), "answers cuDeviceGet of device 0 with error 101"),
    ],
)
def test_absent_utilisation_is_reported_once_and_memory_stays(machine, board, driver, line):
    reported = machine(board, driver)
    read = device_monitor.Devices([Card(0, 0, memory={"bytes_in_use": 3})], reported.append)
    assert read() == read() == [Reading("gpu0", memory_bytes=3)]
    assert len(reported) == 1
    assert line in reported[0]


def test_nvml_error_during_the_run_is_reported_once_and_reading_continues(machine):
    board = Board({f"GPU-{uuid(1)}": 10, f"GPU-{uuid(2)}": 20})
    reported = machine(board, Driver(1, 2))
    read = device_monitor.Devices([Card(0, 0, memory={"bytes_in_use": 3}), Card(1, 1)], reported.append)
    assert [reading.utilisation for reading in read()] == [0.1, 0.2]
    board.failure = NVMLError("GPU is lost")
    for _ in range(2):
        assert read() == [Reading("gpu0", memory_bytes=3), Reading("gpu1")]
    (line,) = reported
    assert "GPU is lost" in line


@pytest.mark.gpu
def test_real_card_has_every_measure():
    reported: list[str] = []
    for reading in device_monitor.Devices(jax.local_devices(backend="cuda"), reported.append)():
        assert None not in (reading.memory_bytes, reading.limit_bytes, reading.utilisation, reading.celsius)
        assert reading.card_bytes and reading.watts
    assert reported == []
