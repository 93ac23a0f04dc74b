"""Mesh with the axes data and model. Axis types are set here only."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharding.errors import PlacementError

AXES = ("data", "model")

Device = Any  # a jax.Device, which type checkers take for a variable


def make(*, data: int = -1, model: int = 1, devices: Sequence[Device] | None = None) -> Mesh:
    """Returns the mesh ("data", "model"), where data=-1 takes the devices that remain.

    An explicit data x model below the number of devices takes the first ones. Raises PlacementError
    with the legal sizes for everything that does not fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    data = fill(data, model, len(devices))
    used = devices[: data * model]
    processes = len({device.process_index for device in devices})
    check_processes(len(devices), used=len(used), model=model, processes=processes)
    # In the order of processes, as the planner counts on. jax.make_mesh refuses GPUs of several nodes: XLA takes each
    # node for a slice.
    return Mesh(np.asarray(used).reshape(data, model), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def fill(data: int, model: int, count: int) -> int:
    """Returns the data axis with -1 filled in; raises PlacementError for sizes that `count` devices do not form."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    legal = ", ".join(f"data={count // n} model={n}" for n in divisors)
    request = f"mesh data={data} model={model} on {count} devices"
    if data == 0:
        raise PlacementError(f"{request}: each axis is at least 1, and at most one is -1 (what remains); use {legal}")
    if data == -1 and count % model:
        raise PlacementError(f"{request}: {model} does not divide {count}; use {legal}, or name both axes for fewer")
    data = count // model if data == -1 else data
    if data * model > count:
        raise PlacementError(f"{request}: it needs {data * model} devices; use {legal}")
    return data


def check_processes(count: int, *, used: int, model: int, processes: int) -> None:
    if processes == 1:
        return
    if used != count:
        raise PlacementError(
            f"mesh of {used} of {count} devices over {processes} processes: some process would own none of it; use "
            "all devices or start fewer processes"
        )
    local = count // processes
    if local % model:
        raise PlacementError(
            f"mesh model={model} over processes of {local} devices: the model axis stays inside one process, because "
            f"each process loads its own examples; use a divisor of {local}"
        )
