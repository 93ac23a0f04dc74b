"""Runtime of a process: distributed start, devices, compile cache, preemption."""

import collections
import contextlib
import math
import os
import signal
import sys
import types
from pathlib import Path
from typing import Self

import jax

from lw_jax.core import launcher, precision, process_start, processes
from lw_jax.core.environment import has_cuda, idle_libraries, memory_fraction
from lw_jax.core.errors import UserError
from lw_jax.core.files import make_cache

REQUEUE = process_start.REQUEUE
_LEAST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def start(*, devices: bool = True) -> bool:
    """Joins the processes of a SLURM step of several tasks; returns whether there are several.

    See `launcher.read`. Must be called before anything touches a device; starts them unless told otherwise.
    """
    several = jax.distributed.is_initialized()
    if not several and (step := launcher.read()):
        processes.join(step)
        several = True
    if devices:
        start_devices()
    return several


def start_devices() -> None:
    """Starts the devices.

    Raises:
      UserError: JAX_PLATFORMS names what is not here, or is not set and no GPU of a machine for them can be used: JAX
        may go on without either. Or 64-bit numbers are turned on, or processes have unequal numbers of devices.
    """
    if jax.config.values["jax_enable_x64"]:  # other dtypes within programs, other random draws
        raise UserError(
            "JAX_ENABLE_X64: 64-bit numbers are on, and programs here are of 32 bits; leave it out, or put what lw_jax "
            "does into `with jax.enable_x64(False):`"
        )
    asked = False
    for variable in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        platforms = jax.config.values[variable.lower()]
        asked |= bool(platforms)
        for name in platforms.split(",") if platforms else ():
            try:
                jax.devices(name or None)
            except (RuntimeError, AssertionError) as error:
                why = str(error) or "no device or driver of it is on this machine"
                rule = "leave it out to run on what is here, or set JAX_PLATFORMS=cpu"
                raise UserError(f"{variable}={platforms!r}: {name!r}: {why}; {rule}") from error
    why = "JAX found none, what stands above says why"
    try:
        if asked or jax.devices()[0].platform != "cpu" or not has_cuda():
            return _check_shares()
    except RuntimeError as error:
        if not has_cuda():
            raise
        why = str(error)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    rule = "ask the scheduler for GPUs, or the container for its driver (apptainer --nv); JAX_PLATFORMS=cpu needs none"
    raise UserError(f"a GPU's driver is here and no GPU can be used, CUDA_VISIBLE_DEVICES={seen!r}: {why}; {rule}")


def _check_shares() -> None:
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        rule = "each must have as many; ask for --gpus-per-node=N in place of --gpus=N"
        raise UserError(f"processes have {[counts[rank] for rank in sorted(counts)]} devices: {rule}")


def allocator_limit() -> int | None:
    """Returns the bytes that JAX may take of the smallest local device; None where the runtime reports none (CPU)."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    known = [limit for limit in limits if limit]
    return int(min(known)) if len(known) == len(limits) else None


def device_memory() -> int | None:
    """Returns the memory of the smallest local device in bytes; None where the runtime reports none (CPU)."""
    limit = allocator_limit()
    return int(limit / memory_fraction()) if limit else None


def describe() -> str:
    """Returns one line: kind, memory and compute capability of the devices, and the number of processes.

    The kind is for people; nothing depends on a name.
    """
    device, memory, count = jax.local_devices()[0], device_memory(), jax.device_count()
    kinds = dict.fromkeys(each.device_kind for each in jax.devices())
    if device.platform == "cpu":
        name = precision.describe_processor()
        parts = [f"{count} virtual devices on a {name}" if count > 1 else name]
    else:
        parts = [f"{count} x {' / '.join(kinds)}"]
    parts += [f"{memory / 1e9:.1f} GB each{' or more' * (len(kinds) > 1)}"] if memory else []
    capability = getattr(device, "compute_capability", None)
    parts += [f"compute capability {capability}"] if capability else []
    if jax.process_count() > 1:
        parts.append(f"{jax.local_device_count()} in each of {jax.process_count()} processes")
    return ", ".join(parts)


def device_line() -> str:
    idle = "; NVIDIA's libraries are installed, but no driver is here" if idle_libraries() else ""
    return f"device: {describe()}{idle}"


def tell_device() -> None:
    """Prints `device_line` on standard error, from the first process; starts the devices."""
    start_devices()
    if jax.process_index() == 0:
        print(device_line(), file=sys.stderr, flush=True)


def enable_compile_cache(folder: Path) -> None:
    """Enables JAX's persistent compilation cache in `folder`, for programs of any size.

    A run has a hundred small programs, of 50 ms each. JAX_COMPILATION_CACHE_DIR, a folder that jax.config has already
    and JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS take precedence. A read-only folder is read. To be called behind
    `start_devices`: several processes on GPUs have no cache. XLA shares the work of autotuning a program among them,
    and one that found it in its cache would leave the others waiting for its share.

    Raises:
      UserError: the folder does not exist and cannot be made.
    """
    if jax.process_count() > 1 and jax.default_backend() != "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if _LEAST not in os.environ:
        jax.config.update(_LEAST.lower(), 0.0)
    named = jax.config.values["jax_compilation_cache_dir"]  # by the variable, or in this process
    if named in (None, "", str(folder)):
        jax.config.update("jax_compilation_cache_dir", str(make_cache(folder)))
    else:
        folder = Path(named)
    if folder.exists() and not os.access(folder, os.W_OK):  # or JAX would warn of each program that it cannot write
        jax.config.update(_LEAST.lower(), math.inf)


class Preemption(contextlib.ExitStack):
    """Turns SIGTERM and the first Ctrl-C into a flag that the training loop reads after each step.

    One process: the handlers set the flag; a second Ctrl-C raises KeyboardInterrupt at once. Several processes: JAX's
    preemption sync manager receives SIGTERM and makes all of them agree on the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._signal: int | None = None

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            handling = process_start.handling({signal.SIGTERM: self._receive, signal.SIGINT: self._receive})
            self.enter_context(handling)
        else:
            processes.agree_on_stops()
        return self

    def requested(self, step: int) -> bool:
        """Says whether to save and stop after `step`; every process calls it equally often and gets the same answer."""
        del step
        if jax.process_count() == 1:
            return self._signal is not None
        from jax.experimental import multihost_utils

        self._calls += 1  # JAX wants a growing number; a step is asked for again between batches of its validation
        return multihost_utils.reached_preemption_sync_point(self._calls)

    def _receive(self, number: int, _: types.FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        # os.write: print is not safe inside a handler that may have interrupted another print.
        os.write(2, b"\nstopping after this step; everything is saved first (Ctrl-C again: stop at once)\n")
