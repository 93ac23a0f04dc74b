"""lw_jax/core/processes.py, peers.py: a dead process is noticed at once, a wait obeys signals; the first decides."""

import contextlib
import dataclasses
import json
import queue
import socket
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from lw_jax.core import peers, process_start, processes
from lw_jax.core.errors import UserError
from lw_jax.core.launcher import Step
from lw_jax.core.peers import Watch


def steps(count: int) -> list[Step]:
    """The processes of a step on this machine."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    return [Step(rank, count, "localhost", port, (rank,), "7.0") for rank in range(count)]


def watch_of(step: Step) -> tuple[Watch, queue.SimpleQueue]:
    """A process's watch, and what it ends its process with: messages and codes."""
    ended = queue.SimpleQueue()
    return Watch(step, end=lambda message, code: ended.put((message, code))), ended


def wait_for_end(ended: queue.SimpleQueue) -> tuple[str, int]:
    told = ended.get(timeout=10)
    assert ended.empty(), "a process ends once"
    return told


@pytest.fixture
def three(monkeypatch) -> list[tuple[Watch, queue.SimpleQueue]]:
    """The watches of three processes, connected; the first one comes last, after a stranger's knock."""
    monkeypatch.setattr(peers, "GRACE", 0.05)
    monkeypatch.setattr(peers, "NEWS", 0.2)
    found = [watch_of(step) for step in steps(3)]
    meeting = [threading.Thread(target=watch.meet, args=(30,)) for watch, _ in found]
    for thread in meeting[1:]:
        thread.start()
    time.sleep(0.2)
    assert found[1][0].waits_for.startswith("for process 0 at localhost"), found[1][0].waits_for
    meeting[0].start()
    for thread in meeting:
        thread.join(30)
    assert sorted(found[0][0]._links) == [1, 2] and all(watch.everybody for watch, _ in found)
    return found


def test_stranger_at_the_port_is_no_process():
    first, second = steps(2)
    watch, _ = watch_of(first)
    meeting = threading.Thread(target=watch.meet, args=(30,))
    meeting.start()
    other = dataclasses.replace(second, name="8.0")
    with pytest.raises(UserError, match="not process 0 of this step"):
        watch_of(other)[0].meet(3)
    watch_of(second)[0].meet(30)
    meeting.join(30)
    assert sorted(watch._links) == [1]


def die(watch: Watch) -> None:
    """Closes its connections as the kernel does; a dead process says nothing."""
    watch._send = lambda line, besides=None: None
    for link in watch._links.values():
        with contextlib.suppress(OSError):  # closed from the other side
            link.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("dead", [0, 1])
def test_death_of_any_process_ends_the_others_for_the_queue(three, dead):
    die(three[dead][0])
    for rank in {0, 1, 2} - {dead}:
        told, code = wait_for_end(three[rank][1])
        assert code == process_start.REQUEUE
        assert told.startswith(f"process {dead} of 3 is gone") and "\n" not in told


def test_processes_that_say_goodbye_end_nobody(three):
    for watch, _ in reversed(three):
        watch.leave(0)
        time.sleep(0.05)  # its word before the end of its connection
    for watch, _ in reversed(three):
        die(watch)
    time.sleep(0.1)
    assert all(ended.empty() for _, ended in three)


def test_error_of_one_ends_the_others_with_its_code_after_a_grace(three):
    three[1][0].leave(2)
    for rank in (0, 2):
        told, code = wait_for_end(three[rank][1])
        assert code == 2 and told.startswith("process 1 of 3 has ended with code 2")


def test_error_of_its_own_ends_a_process_with_its_own_code_when_the_first_is_gone(three):
    three[1][0].leave(2)
    die(three[0][0])
    assert wait_for_end(three[1][1]) == ("", 2)


def test_what_the_first_process_finds_holds_for_all(monkeypatch):
    store: dict[str, str] = {}
    client = SimpleNamespace(key_value_set=store.__setitem__, blocking_key_value_get=lambda key, _: store[key])
    monkeypatch.setattr(processes, "_client", lambda: client)
    monkeypatch.setattr(jax, "process_index", lambda: pytest.fail("the devices of another run's owner were started"))
    monkeypatch.setattr(processes, "_numbers", iter([0, 1, 0, 1]))

    def refuse():
        raise UserError("all are damaged")

    assert processes.from_first(lambda: {"step": 50}) == {"step": 50}
    with pytest.raises(UserError, match="all are damaged"):
        processes.from_first(refuse)
    monkeypatch.setattr(processes.distributed.global_state, "process_id", 1)
    assert processes.from_first(lambda: {"step": 51}) == {"step": 50}
    with pytest.raises(UserError, match="all are damaged"):
        processes.from_first(lambda: None)
    assert json.loads(store["latentwire/decision/0"]) == {"value": {"step": 50}}


def test_more_bytes_than_a_piece_are_gathered_in_pieces_whatever_each_process_has(monkeypatch):
    data, widths, barrier = [b"", b"0123456", b"0123456789abcdef"], set(), threading.Barrier(3)
    given, found = [np.zeros(0)] * 3, [[b""]] * 3
    rank = threading.local()

    def process_allgather(values):
        given[rank.number] = values
        widths.add(values.size)
        barrier.wait(10)
        gathered = np.stack(given)
        barrier.wait(10)
        return gathered

    def run(number):
        rank.number = number
        found[number] = processes._gather_bytes(data[number])

    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    monkeypatch.setattr(processes, "PIECE", 4)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [data] * 3 and max(widths) == 4
