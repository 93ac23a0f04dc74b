"""Processes of one run: decisions of the first one hold for all, and all end when one of them dies.

JAX detects a dead process after 100 seconds; a process whose coordinator died is ended within milliseconds. Both end by
SIGABRT with a dump, after which no scheduler requeues a job, and neither can be changed from Python (jaxlib 0.10.2).
So every process keeps a TCP connection to the first one, which the kernel closes when either dies, and JAX's own
connection to the coordinator passes a relay inside the process, which stays open. TCP keepalive detects a lost machine.
"""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from jax._src import clusters, distributed

from lw_jax.core.early_signals import REQUEUE
from lw_jax.core.errors import UserError
from sharding.errors import PlacementError

USER_ERROR = 2
JOIN = 300  # seconds for all processes to start and import, JAX's own default
HEARTBEAT = 300  # seconds of JAX's own heartbeat, above ours: the relay needs the GIL, JAX's threads do not
NEWS = 10  # seconds for news of a death that made a collective of this process fail
GRACE = 30  # seconds for a process to end by itself, with its own message, after an error of another one
SAVING = 240  # the same after a stop on request, while this one may be committing a checkpoint; JAX waits for 300
PATIENCE = 24 * 3600  # seconds for a decision of the first process; its death is detected by the watch
WATCH = "latentwire/watch"  # key of the first process's port
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}  # 30 s in all

_watch: "Watch | None" = None
_numbers = itertools.count()  # of decisions; all processes make the same ones


def join() -> None:
    """Joins the processes of this SLURM step; from here on each ends with REQUEUE when another one is gone."""
    global _watch
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, JOIN)
    address = os.environ.get("JAX_COORDINATOR_ADDRESS") or found[0]
    assert address is not None and found[1] is not None and found[2] is not None, "asked for inside a step alone"
    host, port = address.rsplit(":", 1)
    relay = Relay(host, int(port)) if found[2] else None
    jax.distributed.initialize(
        coordinator_address=relay.address if relay else None,
        initialization_timeout=JOIN,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    if relay:
        relay.holds = True
    _watch = Watch(found[2], found[1], end=end)
    _watch.connect(distributed.global_state.client, host)
    delay_abort()
    atexit.register(_watch.leave, 0)  # runs before JAX's own shutdown, which waits for the others


class Together(contextlib.ContextDecorator):
    """Decorator of a function that several processes run: reports to the others how this one left it."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: types.TracebackType | None):
        """Reports the exit code; after an error that another process's death may have caused, waits for news of it."""
        if _watch is None:
            return
        user_error = isinstance(error, UserError | PlacementError)
        if isinstance(error, Exception) and not user_error:
            time.sleep(NEWS)  # the thread that hears of the death ends this process meanwhile
        code = error.code if isinstance(error, SystemExit) else 0 if error is None else USER_ERROR if user_error else 1
        _watch.leave(code if isinstance(code, int) else 1)


def from_first(make: Callable[[], Any]) -> Any:
    """Returns what `make` returns in the first process, in every process; it runs there alone.

    The value travels as JSON. A UserError is raised in every process.
    """
    client = _client()
    if client is None:
        return make()
    key = f"latentwire/decision/{next(_numbers)}"
    if jax.process_index() == 0:
        try:
            value = make()
        except UserError as error:
            client.key_value_set(key, json.dumps({"error": str(error)}))
            raise
        client.key_value_set(key, json.dumps({"value": value}))
        return value
    found = json.loads(client.blocking_key_value_get(key, PATIENCE * 1000))
    if "error" in found:
        raise UserError(found["error"])
    return found["value"]


def share() -> tuple[int, int]:
    """Returns this process's number and how many there are: its slice of what they do together."""
    return jax.process_index(), jax.process_count()


def gather(value: Any) -> list[Any]:
    """Returns the value of every process, in their order, to every process; all call it equally often.

    Values travel as JSON, arrays of one process as `gather_rows` does; floats keep every bit.
    """
    if jax.process_count() == 1:
        return [value]
    return [json.loads(one) for one in _gather_bytes(json.dumps(value).encode())]


def gather_rows(rows: np.ndarray) -> list[np.ndarray]:
    """Returns the rows [n ...] of every process, in their order; n may differ between them."""
    if jax.process_count() == 1:
        return [rows]
    return [np.frombuffer(one, rows.dtype).reshape(-1, *rows.shape[1:]) for one in _gather_bytes(rows.tobytes())]


def _gather_bytes(data: bytes) -> list[bytes]:
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32)).reshape(-1)
    padded = np.zeros(1 << int(max(1, sizes.max())).bit_length(), np.uint8)  # few sizes: each compiles a program
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    found = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(found, sizes.tolist(), strict=True)]


def _client() -> Any:
    """Returns JAX's client of the coordinator, which has no public name; None: this process is alone.

    `jax.process_count` would start the devices, and a run whose folder is taken must not touch those of its owner.
    """
    return distributed.global_state.client if distributed.global_state.num_processes > 1 else None


class Relay:
    """Relay of JAX's traffic to the coordinator; while it `holds`, JAX does not notice the coordinator's death."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.holds = False
        _start(self._accept)

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target, timeout=NEWS)
            except OSError:  # the coordinator has not started: JAX tries again until its own time is over
                near.close()
                continue
            for one in (near, far):
                one.settimeout(None)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(self._pump, near, far, False)
            _start(self._pump, far, near, True)

    def _pump(self, source: socket.socket, sink: socket.socket, from_coordinator: bool) -> None:
        with contextlib.suppress(OSError):  # a connection that breaks ends as one that is closed
            while data := source.recv(1 << 16):
                sink.sendall(data)
        source.close()
        if not (from_coordinator and self.holds):
            sink.close()


class Watch:
    """Connections between the first process and each of the others.

    A line is "left RANK CODE" from a process that exits, or "gone RANK" from the first one about a process that died.
    A connection that closes without a line is a death. `end` is called once, with a message and the exit code.
    """

    def __init__(self, rank: int, count: int, *, end: Callable[[str, int], None]) -> None:
        self.rank, self.count, self._end = rank, count, end
        self._links: dict[int, socket.socket] = {}  # of the first process: all others; of another one: the first
        self._left: dict[int, int] = {}  # rank -> exit code of those that exited
        self._lock = threading.Lock()
        self._ended = False

    def connect(self, client: Any, host: str) -> None:
        """Connects each process with the first one, whose port is in JAX's key-value store."""
        if self.rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=self.count)
            word = secrets.token_hex(16)
            client.key_value_set(WATCH, f"{listener.getsockname()[1]} {word}")
            _start(self._accept, listener, word)
            return
        port, word = client.blocking_key_value_get(WATCH, JOIN * 1000).split()
        try:
            link = socket.create_connection((host, int(port)), timeout=JOIN)
            link.sendall(f"{word} {self.rank}\n".encode())
        except OSError as error:
            raise UserError(
                f"{host}:{port}: process {self.rank} cannot reach process 0 ({error.strerror}); the nodes of a job "
                "must reach each other at any port, as NCCL needs it too"
            ) from error
        self._add(0, link)

    def leave(self, code: int) -> None:
        """Reports the exit of this process to the others; the first call counts."""
        with self._lock:
            first = self.rank not in self._left
            self._left.setdefault(self.rank, code)
        if first:
            self._send(f"left {self.rank} {code}")

    def _accept(self, listener: socket.socket, word: str) -> None:
        with listener:
            while len(self._links) < self.count - 1:
                link, _ = listener.accept()
                link.settimeout(NEWS)
                with contextlib.suppress(OSError):
                    said = _read_line(link)
                    if len(said) == 2 and secrets.compare_digest(said[0], word):
                        self._add(int(said[1]), link)
                        continue
                link.close()  # a stranger

    def _add(self, rank: int, link: socket.socket) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            self._links[rank] = link
        _start(self._listen, rank, link)

    def _listen(self, rank: int, link: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a connection that breaks ends as one that is closed
            while fields := _read_line(link):
                self._receive(fields)
        link.close()
        with self._lock:
            dead, mine = rank not in self._left, self._left.get(self.rank, 0)
        if mine not in (0, REQUEUE):  # ended with an error of its own, it only waits for JAX's shutdown barrier
            self._finish("", mine)
        elif dead:
            self._send(f"gone {rank}")
            self._lose(rank)

    def _receive(self, fields: list[str]) -> None:
        rank = int(fields[1])
        if fields[0] == "gone":
            self._lose(rank)
            return
        code = int(fields[2])
        with self._lock:
            self._left[rank] = code
        self._send(" ".join(fields), besides=rank)
        if code:  # this process would wait for it
            _start(self._follow, rank, code)

    def _follow(self, rank: int, code: int) -> None:
        time.sleep(SAVING if code == REQUEUE else GRACE)
        message = (
            f"process {rank} of {self.count} has ended with code {code}, as its own message says: this one ends too"
        )
        self.leave(code)
        self._finish(message, code)

    def _lose(self, rank: int) -> None:
        message = (
            f"process {rank} of {self.count} is gone (killed, out of memory, or its machine is down): this one ends "
            f"with code {REQUEUE}; the same command resumes from the last checkpoint"
        )
        self._finish(message, REQUEUE)

    def _finish(self, message: str, code: int) -> None:
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            self._end(message, code)

    def _send(self, line: str, *, besides: int | None = None) -> None:
        """Sends a line: the first process to all others, another one to the first alone."""
        with self._lock:
            links = [] if besides is not None and self.rank else list(self._links.items())
        for rank, link in links:
            if rank != besides:
                with contextlib.suppress(OSError):  # it is gone too, which its own thread notices
                    link.sendall(f"{line}\n".encode())


def end(message: str, code: int) -> None:
    """Ends this process at once; an unfinished checkpoint stays uncommitted."""
    flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
    flushing.start()
    flushing.join(1)  # another thread may hold the stream
    os.write(2, f"{message}\n".encode() if message else b"")
    os._exit(code)


def delay_abort() -> None:
    """Delays a C++ abort of this process by six seconds, within which the watch can end it with a message.

    When another process dies, Gloo's threads may abort before the watch's thread runs. The handler is libc's `sleep`,
    called with the signal's number, six: it needs no GIL.
    """
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT.value, libc.sleep)


def _start(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True, name="latentwire-peers").start()


def _read_line(link: socket.socket) -> list[str]:
    """Returns the fields of the next line, of at most 200 bytes; none at the end of the connection."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 200:
        byte = link.recv(1)
        if not byte:
            return []
        line += byte
    return line.decode("ascii", "replace").split()
