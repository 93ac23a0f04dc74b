"""Placement of the trainable parameters (encoder, adapters, optimizer) and of every frozen reader on devices.

The strategy's name decides meshes and tables; nothing else in the project depends on it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from sharding import mesh as meshes
from sharding.errors import PlacementError
from sharding.mesh import Device

# Name -> layout of the frozen readers; the trainable parameters are replicated over their mesh.
STRATEGIES = {
    "single": "everything on the first device",
    "replicate": "readers whole on every device, the batch over all",
    "fsdp": "readers' weights over the data axis, gathered layer by layer",
    "tensor": "readers' weights over the model axis, the batch over the data axis",
    "split": "one equal group of devices for each reader, whole on each of its devices (or over mesh.model of them)",
    "hybrid3": "the larger reader over two devices, the smaller on the third",
    "hybrid4": "two readers, each over pairs of its half, the batch over the pairs",
}


MULTI_MESH = ("split", "hybrid3", "hybrid4")  # readers on devices of their own: one process drives them all


@dataclasses.dataclass(frozen=True)
class Component:
    """Mesh of one frozen reader and its table of `sharding.tables`."""

    mesh: Mesh
    table: str
    parts: int = 1  # of a model's heads, widths and vocabulary, one of which the mesh's one device stands for


@dataclasses.dataclass(frozen=True)
class Placement:
    """Meshes of all components; the data axis has the same size in each."""

    strategy: str
    learner: Mesh
    readers: Mapping[str, Component]
    stands_for: str = ""  # platform of the absent devices for which CPU devices stand in an estimate

    @property
    def platform(self) -> str:
        return self.stands_for or self.learner.devices.flat[0].platform

    @property
    def on_several_meshes(self) -> bool:
        """Says whether a reader is on other devices than the trainable parameters: one program cannot hold both."""
        return any(component.mesh != self.learner for component in self.readers.values())

    @property
    def data(self) -> int:
        return self.learner.shape["data"]

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return tuple(dict.fromkeys([self.learner, *(component.mesh for component in self.readers.values())]))

    @property
    def devices(self) -> int:
        return len({device for mesh in self.meshes for device in mesh.devices.flat})

    @property
    def kind(self) -> str:
        """Kinds of its devices, for people; a machine may have several."""
        devices = (device for mesh in self.meshes for device in mesh.devices.flat)
        return " / ".join(dict.fromkeys(device.device_kind for device in devices))

    def on_one_device(self, *, whole: bool = False) -> "Placement":
        """Returns what one device computes: all components on one, of a model over the model axis its part.

        `whole`: all of it, for what each device of a model axis computes whole.
        """
        mesh = meshes.make(data=1, model=1, devices=[self.learner.devices.flat[0]])
        parts = {
            name: 1 if whole or reader.table != "tensor" else reader.mesh.shape["model"]
            for name, reader in self.readers.items()
        }
        readers = {name: Component(mesh, "replicate", parts[name]) for name in self.readers}
        return Placement("single", mesh, readers, self.platform)

    def describe(self) -> str:
        available = jax.device_count()
        idle = available - self.devices
        unused = f"; {idle} of {available} devices stay unused" if idle else ""
        if not self.on_several_meshes:
            return f"placement {self.strategy}: {_sizes(self.learner)} on {self.devices} {self.kind}{unused}"
        lines = [f"trainable parameters {_where(self.learner)}"]
        lines += [f"{name} {_where(component.mesh)}" for name, component in self.readers.items()]
        return f"placement {self.strategy}: {', '.join(lines)} on {self.devices} {self.kind}{unused}"


def one_mesh(mesh: Mesh, readers: Sequence[str], *, table: str = "replicate") -> Placement:
    return Placement(table, mesh, {name: Component(mesh, table) for name in readers})


def place(
    strategy: str,
    readers: Mapping[str, int],
    *,
    data: int = -1,
    model: int = 1,
    devices: Sequence[Device] | None = None,
) -> Placement:
    """Returns the placement of all components.

    Args:
        strategy: one of `STRATEGIES`.
        readers: name -> bytes of its weights; the largest reader gets more devices.
        data: size of the data axis; -1: the devices that remain.
        model: devices that share one reader's weights (tensor, split).
        devices: default: all.

    Raises:
        PlacementError: the strategy and the number of devices, readers or processes do not go together.
    """
    devices = list(jax.devices() if devices is None else devices)
    if strategy == "single":
        first = one_mesh(meshes.make(data=1, model=1, devices=devices), list(readers))
        return dataclasses.replace(first, strategy="single")
    if strategy in ("replicate", "fsdp", "tensor"):
        return one_mesh(meshes.make(data=data, model=model, devices=devices), list(readers), table=strategy)
    if strategy not in STRATEGIES:
        raise PlacementError(f"mesh.placement={strategy!r} is not one of {', '.join(STRATEGIES)}")
    check_processes(strategy, data, model, devices=len(devices), processes=len({d.process_index for d in devices}))
    if strategy == "hybrid3":
        return _hybrid3(readers, devices)
    return _split(strategy, readers, devices, data=data, model=2 if strategy == "hybrid4" else model)


def check_processes(strategy: str, data: int, model: int, *, devices: int, processes: int) -> None:
    """Raises PlacementError where a strategy cannot run on so many devices in so many processes of equal size."""
    if processes == 1:
        return
    if strategy in MULTI_MESH:
        raise PlacementError(
            f"mesh.placement={strategy!r} over several processes ({processes}, one a node): latents cross between "
            "devices of one process only; use replicate, fsdp or tensor, or auto, which takes one of them; or one node"
        )
    data, model = (1, 1) if strategy == "single" else (meshes.fill(data, model, devices), model)
    meshes.check_processes(devices, used=data * model, model=model, processes=processes)


def _split(strategy: str, readers: Mapping[str, int], devices: list[Device], *, data: int, model: int) -> Placement:
    count, request = len(devices), f"mesh.placement={strategy!r} on {len(devices)} devices"
    if len(readers) < 2 or (strategy == "hybrid4" and len(readers) != 2):
        raise PlacementError(f"{request} with {len(readers)} readers: it separates readers; use replicate or tensor")
    if data != -1:
        count = data * model * len(readers)
    if count > len(devices) or count % (len(readers) * model):
        unit = len(readers) * model
        raise PlacementError(
            f"{request}: {len(readers)} readers of model={model} need a multiple of {unit} devices; "
            f"use {unit * max(1, len(devices) // unit)} devices or another placement"
        )
    size = count // len(readers)
    components = {}
    for index, name in enumerate(readers):
        part = devices[index * size : (index + 1) * size]
        mesh = meshes.make(data=size // model, model=model, devices=part)
        components[name] = Component(mesh, "tensor" if model > 1 else "replicate")
    return Placement(strategy, next(iter(components.values())).mesh, components)


def _hybrid3(readers: Mapping[str, int], devices: list[Device]) -> Placement:
    if len(devices) < 3 or len(readers) != 2:
        raise PlacementError(
            f"mesh.placement='hybrid3' on {len(devices)} devices with {len(readers)} readers: it needs three devices "
            "and two readers; use another placement"
        )
    larger = max(readers, key=lambda name: readers[name])
    pair = meshes.make(data=1, model=2, devices=devices[:2])
    third = meshes.make(data=1, model=1, devices=devices[2:3])
    components = {
        name: Component(pair, "tensor") if name == larger else Component(third, "replicate") for name in readers
    }
    return Placement("hybrid3", pair, components)


def _sizes(mesh: Mesh) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _where(mesh: Mesh) -> str:
    ids = [device.id for device in mesh.devices.flat]
    shown = str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
    return f"on {shown} ({_sizes(mesh)})"
