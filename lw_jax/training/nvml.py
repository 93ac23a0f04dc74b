"""NVML readings of this process's CUDA devices: memory of the card, utilisation, temperature and power."""

import ctypes
import importlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any


class Cards:
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
        self._handles = {ordinal: self._find(read_uuid(ordinal, driver=driver)) for ordinal in ordinals}

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


def open_cards(ordinals: Iterable[int], *, report: Callable[[str], None]) -> Cards | None:
    """Opens NVML for CUDA ordinals; reports why and returns None where the package, the driver or a card is absent."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        report("no utilisation of the devices: the package nvidia-ml-py is not installed")
        return None
    try:
        nvml.nvmlInit()
        return Cards(ordinals, nvml=nvml, driver=ctypes.CDLL("libcuda.so.1"))
    except (nvml.NVMLError, OSError) as error:
        report(f"no utilisation of the devices: {error}")
        return None


def read_uuid(ordinal: int, *, driver: Any) -> uuid.UUID:
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
