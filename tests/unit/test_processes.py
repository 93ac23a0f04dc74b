"""lw_jax/core/processes.py: a dead process is noticed at once, one that ends in order is let go; the first decides."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from lw_jax.core import processes
from lw_jax.core.errors import UserError


class Client:
    """JAX's key-value store, in this process."""

    def __init__(self):
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        until = time.monotonic() + timeout_in_ms / 1000
        while key not in self.values and time.monotonic() < until:
            time.sleep(0.001)
        return self.values[key]


class Ended:
    """Takes what a watch ends its process with."""

    def __init__(self):
        self.said: list[tuple[str, int]] = []
        self.event = threading.Event()

    def __call__(self, told: str, code: int) -> None:
        self.said.append((told, code))
        self.event.set()


@pytest.fixture
def three(monkeypatch) -> list[tuple[processes.Watch, Ended]]:
    """The watches of three processes, connected."""
    monkeypatch.setattr(processes, "GRACE", 0.05)
    client, found = Client(), []
    for rank in range(3):
        ended = Ended()
        watch = processes.Watch(rank, 3, end=ended)
        watch.connect(client, "localhost")
        found.append((watch, ended))
    first = found[0][0]
    until = time.monotonic() + 10
    while len(first._links) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    assert sorted(first._links) == [1, 2]
    return found


def die(watch: processes.Watch) -> None:
    """Closes its connections as the kernel does; a dead process says nothing."""
    watch._send = lambda line, besides=None: None
    for link in watch._links.values():
        with contextlib.suppress(OSError):  # closed from the other side
            link.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("dead", [0, 1])
def test_death_of_any_process_ends_the_others_for_the_queue(three, dead):
    die(three[dead][0])
    for rank in {0, 1, 2} - {dead}:
        ended = three[rank][1]
        assert ended.event.wait(10)
        ((told, code),) = ended.said
        assert code == processes.REQUEUE
        assert told.startswith(f"process {dead} of 3 is gone") and "\n" not in told


def test_processes_that_say_goodbye_end_nobody(three):
    for watch, _ in reversed(three):
        watch.leave(0)
        time.sleep(0.02)  # its word before the end of its connection
    for watch, _ in reversed(three):
        die(watch)
    time.sleep(0.1)
    assert not any(ended.said for _, ended in three)


def test_error_of_one_ends_the_others_with_its_code_after_a_grace(three):
    three[1][0].leave(2)
    for rank in (0, 2):
        assert three[rank][1].event.wait(10)
        ((told, code),) = three[rank][1].said
        assert code == 2 and told.startswith("process 1 of 3 has ended with code 2")


def test_relay_passes_bytes_and_holds_when_the_coordinator_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        relay = processes.Relay("127.0.0.1", coordinator.getsockname()[1])
        host, port = relay.address.split(":")
        near = socket.create_connection((host, int(port)), timeout=10)
        far, _ = coordinator.accept()
        near.sendall(b"ask")
        assert far.recv(10) == b"ask"
        far.sendall(b"answer")
        assert near.recv(10) == b"answer"
        relay.holds = True
        far.close()
        near.settimeout(0.1)
        with pytest.raises(TimeoutError):  # without the relay: b"", the end of the connection
            near.recv(10)
        near.close()


ABORTED = """
import ctypes, threading
from lw_jax.core import processes
processes.delay_abort()
threading.Timer(0.3, processes.end, ["process 0 of 2 is gone", processes.REQUEUE]).start()
ctypes.CDLL(None).abort()
"""


def test_abort_in_a_library_waits_for_the_reason():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, "-c", ABORTED], capture_output=True, text=True, env=environment, timeout=60)
    assert found.returncode == processes.REQUEUE, found.stderr
    assert found.stderr.endswith("process 0 of 2 is gone\n")


def test_what_the_first_process_finds_holds_for_all(monkeypatch):
    client = Client()
    monkeypatch.setattr(processes, "_client", lambda: client)
    monkeypatch.setattr(processes, "_numbers", iter([0, 1, 0, 1]))

    def refuse():
        raise UserError("all are damaged")

    assert processes.from_first(lambda: {"step": 50}) == {"step": 50}
    with pytest.raises(UserError, match="all are damaged"):
        processes.from_first(refuse)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert processes.from_first(lambda: {"step": 51}) == {"step": 50}
    with pytest.raises(UserError, match="all are damaged"):
        processes.from_first(lambda: None)
    assert json.loads(client.values["latentwire/decision/0"]) == {"value": {"step": 50}}


def test_process_that_is_alone_decides_without_its_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: pytest.fail("starts the devices"))
    assert processes.from_first(lambda: 7) == 7
