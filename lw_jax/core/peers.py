"""Connections between the processes of one run: they meet, and all end when one of them dies.

JAX detects a dead process after 100 seconds; a process whose coordinator died is ended within milliseconds. Both end by
SIGABRT with a dump, after which no scheduler requeues a job. Nothing in jaxlib 0.10.2 changes that: under
jax_enable_recoverability the coordinator's death aborts the others all the same, and a missed_heartbeat_callback of
Python ends in std::bad_cast.

So every process keeps a TCP connection to the first one, which the kernel closes when either dies, and JAX's own
connection to the coordinator passes a relay inside the process, which stays open. TCP keepalive detects a lost machine.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lw_jax.core.errors import UserError
from lw_jax.core.launcher import Step
from lw_jax.core.process_start import REQUEUE

NEWS = 10  # seconds for news of a death that made a collective of this process fail
GRACE = 30  # seconds for a process to end by itself, with its own message, after an error of another one
SAVING = 240  # the same after a stop on request, while this one may be committing a checkpoint; JAX waits for 300
# News at once, and a lost machine after 30 s.
_OPTIONS = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


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
            for connection in (near, far):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

    def __init__(self, step: Step, *, end: Callable[[str, int], None]) -> None:
        self.step, self.rank, self.count, self._end = step, step.rank, step.count, end
        self._name = ["latentwire", step.name, str(step.count)]
        self._links: dict[int, socket.socket] = {}  # of the first process: all others; of another one: the first
        self._left: dict[int, int] = {}  # rank -> exit code of those that exited
        self._lock = threading.Lock()
        self._ended = False
        self.waits_for, self.everybody = "", False  # while they meet

    def meet(self, seconds: float) -> None:
        """Connects each process with the first one; afterwards the port is free for JAX's coordinator.

        Raises:
          UserError: the others, or the first one, did not come in time, or the port is taken.
        """
        until = time.monotonic() + seconds
        try:
            (self._reach_first if self.rank else self._await_others)(until)
        except TimeoutError as error:
            rule = (
                "the nodes of a job must reach each other, as NCCL needs it too; their logs say why one did not start"
            )
            raise UserError(
                f"process {self.rank} of {self.count}: {self.waits_for}, {seconds:g} s long; {rule}"
            ) from error
        self.everybody, self.waits_for = True, f"all are here, JAX joins them at {self.step.address}"

    def _await_others(self, until: float) -> None:
        links: dict[int, socket.socket] = {}
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            listener = socket.create_server(
                ("", self.step.port), family=family, dualstack_ipv6=dual, backlog=self.count
            )
        except OSError as error:
            rule = "another program has the port; JAX_COORDINATOR_PORT names another one, the same in all processes"
            raise UserError(f"{self.step.address}: {os.strerror(error.errno or 0)}: {rule}") from error
        with listener:
            while len(links) < self.count - 1:
                self.waits_for = f"{len(links) + 1} of {self.count} processes are at {self.step.address}"
                for link in links.values():
                    _send(link, f"here {self.waits_for}")
                try:
                    listener.settimeout(max(1e-3, until - time.monotonic()))
                    link, _ = listener.accept()
                except TimeoutError:
                    for link in links.values():
                        link.close()
                    raise
                link.settimeout(NEWS)
                with contextlib.suppress(OSError):
                    *name, rank = _read_line(link) or [""]
                    if name == self._name and rank.isdecimal() and 0 < int(rank) < self.count:
                        earlier, links[int(rank)] = links.get(int(rank)), link
                        if earlier:  # of a process that was started again
                            earlier.close()
                        continue
                link.close()  # a stranger
        for rank, link in links.items():
            self._add(rank, link)
        self._send("begin")

    def _reach_first(self, until: float) -> None:
        self.waits_for = f"for process 0 at {self.step.address}"
        while (left := until - time.monotonic()) > 0:
            try:
                link = socket.create_connection((self.step.host, self.step.port), timeout=min(left, NEWS))
            except OSError as error:
                why = error.strerror or str(error)
            else:
                if self._begins(link, left):
                    self._add(0, link)
                    return
                link.close()
                why = "what answered is not process 0 of this step, or has gone"
            if time.monotonic() < until:
                self.waits_for = f"for process 0 at {self.step.address}: {why}"
                time.sleep(0.5)
        raise TimeoutError

    def _begins(self, link: socket.socket, seconds: float) -> bool:
        with contextlib.suppress(OSError):
            link.settimeout(seconds)
            _send(link, " ".join([*self._name, str(self.rank)]))
            while (fields := _read_line(link))[:1] == ["here"]:
                self.waits_for = " ".join(fields[1:])
            return fields == ["begin"]
        return False

    def leave(self, code: int) -> None:
        """Reports the exit of this process to the others; the first call counts."""
        with self._lock:
            first = self.rank not in self._left
            self._left.setdefault(self.rank, code)
        if first:
            self._send(f"left {self.rank} {code}")

    def _add(self, rank: int, link: socket.socket) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
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
                _send(link, line)


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


def _send(link: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # the other end is gone, which whoever reads from it notices
        link.sendall(f"{line}\n".encode())


def _read_line(link: socket.socket) -> list[str]:
    """Returns the fields of the next line, of at most 200 bytes; none at the end of the connection."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 200:
        byte = link.recv(1)
        if not byte:
            return []
        line += byte
    return line.decode("ascii", "replace").split()
