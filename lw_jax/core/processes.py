"""Processes of one run: they join, and decisions of the first one hold for all."""

import atexit
import concurrent.futures
import contextlib
import itertools
import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed

from lw_jax.core import launcher, peers
from lw_jax.core.errors import UserError
from lw_jax.core.launcher import Step
from lw_jax.core.peers import Relay, Watch
from lw_jax.core.process_start import INTERRUPTED
from sharding.errors import PlacementError

USER_ERROR = 2
JOIN = 300  # seconds for all processes to start and import, as JAX's own default
HEARTBEAT = 300  # seconds of JAX's own heartbeat, above ours: the relay needs the GIL, JAX's threads do not
PATIENCE = 24 * 3600  # seconds for a decision of the first process; its death is detected by the watch
PIECE = 1 << 28  # bytes of a process that lie on every device at once while they are gathered
SILENT, TOLD_EVERY = 5, 30  # seconds before the first line of a wait to join, and between two

_T = TypeVar("_T")
_watch: Watch | None = None
_numbers = itertools.count()  # of decisions; all processes make the same ones


def join(step: Step) -> None:
    """Joins the processes of a SLURM step; from here on each ends with REQUEUE when another one is gone."""
    watch = Watch(step, end=peers.end)

    def waiting() -> str:
        alone = "" if watch.everybody else f"; where this one is alone: {launcher.ALONE}"
        return f"process {step.rank} of {step.count} waits: {watch.waits_for}, until {until}{alone}"

    until = time.strftime("%H:%M:%S", time.localtime(time.time() + JOIN))
    interruptible(lambda: _join(step, watch), waiting=waiting)


def _join(step: Step, watch: Watch) -> None:
    global _watch
    watch.meet(JOIN)
    relay = Relay(step.host, step.port) if step.rank else None
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM now, see `agree_on_stops`
    os.environ["no_grpc_proxy"] = "127.0.0.1"  # or gRPC asks a cluster's https_proxy for this machine, without end
    jax.config.update("jax_check_proxy_envs", False)
    jax.distributed.initialize(
        coordinator_address=relay.address if relay else f"127.0.0.1:{step.port}",
        num_processes=step.count,
        process_id=step.rank,
        local_device_ids=step.devices,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"[::]:{step.port}",
        initialization_timeout=JOIN,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    if relay:
        relay.holds = True
    _watch = watch
    peers.delay_abort()
    atexit.register(watch.leave, 0)  # runs before JAX's own shutdown, which waits for the others


def interruptible(work: Callable[[], _T], *, waiting: Callable[[], str] | None = None) -> _T:
    """Returns what `work` returns, which waits for other processes: a signal ends this one at once.

    It runs in a thread, as Python runs no handler while the main thread is inside C++. `waiting` says what for.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1, "latentwire-waiting")
    try:
        future = pool.submit(work)
        seconds = SILENT if waiting else None
        while not concurrent.futures.wait([future], seconds).done:
            assert waiting is not None, "without it there is no end of the wait"
            print(waiting(), file=sys.stderr, flush=True)
            seconds = TOLD_EVERY
        return future.result()
    except KeyboardInterrupt:
        if _watch:
            _watch.leave(INTERRUPTED)
        peers.end("", INTERRUPTED)  # nothing else ends the thread
        raise
    finally:
        pool.shutdown(wait=False)


def agree_on_stops() -> None:
    """Makes SIGTERM a request that all processes hear of; until then it ends a process at once, and so the others."""
    if distributed.global_state.client and not distributed.global_state.preemption_sync_manager:
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()


class Together(contextlib.AbstractContextManager[Any], contextlib.ContextDecorator):
    """Decorator of a function that several processes run: reports to the others how this one left it."""

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: types.TracebackType | None):
        """Reports the exit code; after an error that another process's death may have caused, waits for news of it."""
        if _watch is None:
            return
        user_error = isinstance(error, UserError | PlacementError)
        if isinstance(error, Exception) and not user_error:
            time.sleep(peers.NEWS)  # the thread that hears of the death ends this process meanwhile
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
    if distributed.global_state.process_id == 0:  # `jax.process_index` would start the devices, see `_client`
        try:
            value = make()
        except UserError as error:
            client.key_value_set(key, json.dumps({"error": str(error)}))
            raise
        client.key_value_set(key, json.dumps({"value": value}))
        return value
    decision = json.loads(interruptible(lambda: client.blocking_key_value_get(key, PATIENCE * 1000)))
    if "error" in decision:
        raise UserError(decision["error"])
    return decision["value"]


def share() -> tuple[int, int]:
    return jax.process_index(), jax.process_count()


def gather(value: Any) -> list[Any]:
    """Returns the value of every process, in their order, to every process; all call it equally often.

    Values travel as JSON, arrays of one process as `gather_rows` does; floats keep every bit.
    """
    if jax.process_count() == 1:
        return [value]
    return [json.loads(data) for data in _gather_bytes(json.dumps(value).encode())]


def check_agreement(identity: dict[str, str]) -> None:
    """Refuses, in every process, models and data that are not the first one's in all of them."""
    first, *others = gather(identity)
    differing = {
        rank: keys
        for rank, other in enumerate(others, 1)
        if (keys := [key for key in sorted(first | other) if first.get(key) != other.get(key)])
    }
    if differing:
        told = "; ".join(f"{', '.join(keys)} in process {rank}" for rank, keys in differing.items())
        rule = "other models or data than the first process reads; give all nodes the same files and cache"
        raise UserError(f"{told}: {rule}")


def gather_rows(rows: np.ndarray) -> list[np.ndarray]:
    """Returns the rows [n ...] of every process, in their order; n may differ between them."""
    if jax.process_count() == 1:
        return [rows]
    return [np.frombuffer(data, rows.dtype).reshape(-1, *rows.shape[1:]) for data in _gather_bytes(rows.tobytes())]


def _gather_bytes(data: bytes) -> list[bytes]:
    from jax.experimental import multihost_utils

    parted = multihost_utils.process_allgather(np.array([divmod(len(data), PIECE)], np.int32)).reshape(-1, 2)
    sizes = [whole * PIECE + rest for whole, rest in parted.tolist()]
    parts = [[b""] for _ in sizes]
    for first in range(0, max(sizes), PIECE):
        width = min(1 << (max(sizes) - first).bit_length(), PIECE)  # few sizes: each compiles a program
        padded, piece = np.zeros(width, np.uint8), data[first : first + PIECE]
        padded[: len(piece)] = np.frombuffer(piece, np.uint8)
        for part, row, size in zip(parts, multihost_utils.process_allgather(padded), sizes, strict=True):
            part.append(row[: max(0, size - first)].tobytes())
    return [b"".join(part) for part in parts]


def _client() -> Any:
    """Returns JAX's client of the coordinator, which has no public name; None: this process is alone.

    `jax.process_count` would start the devices, and a run whose folder is taken must not touch those of its owner.
    """
    return distributed.global_state.client if distributed.global_state.num_processes > 1 else None
