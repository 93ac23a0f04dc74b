"""Quantised weights that would fit where no placement does, estimated by arithmetic."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import DTYPES
from lw_jax.planning import placement_search
from lw_jax.planning.placement_search import Hardware
from lw_jax.training.memory import bytes_of

Remedy = dict[str, Any]  # an entry of a plan's "remedies"

CLOSE = 1.1  # of the limit; arithmetic is up to 12 % above what is compiled (two RTX 4090, nf4: 21.0 for 19.3 GB)
# Packing -> its name in messages, and the storage types that take more bits.
PACKINGS = {"int8": ("8 bits", (*DTYPES,)), "nf4": ("4 bits", (*DTYPES, "int8", "w8a8"))}


def fewer_bits(cfg: Config, hardware: Hardware) -> list[Remedy]:
    """Returns, for each packing of the readers' weights, every placement that then fits or nearly does.

    By arithmetic, whatever the hardware's compiler: a plan of the packed configuration is the proof. Nothing for a
    recipe without frozen readers, or for readers that are packed as tightly already.
    """
    found, uncompiled = [], dataclasses.replace(hardware, compile=None)
    for packing, (words, larger) in PACKINGS.items():
        names = [name for name, llm in cfg.llms.items() if llm.weights in larger]
        packed = {name: dataclasses.replace(cfg.llms[name], weights=packing) for name in names}
        if not packed:
            continue
        try:
            tried = placement_search.choose(dataclasses.replace(cfg, llms={**cfg.llms, **packed}), uncompiled)
        except UserError:  # its rows are no whole blocks: this model cannot be packed so
            continue
        fits = [_shown(one) for one in tried if one.fits]
        placed = {(one["strategy"], one["mesh"]) for one in fits}
        others = [_shown(one) for one in tried if one.needs and (one.strategy, one.mesh) not in placed]
        assert hardware.room is not None, "planning needs the devices' memory"
        close = [one for one in others if one["peak_bytes"] <= CLOSE * hardware.room.usable]
        found.append(
            {
                "weights": packing,
                "bits": words,
                "assignments": {f"llms.{name}.weights": packing for name in names},
                "fits": sorted(fits, key=_fullness),
                "close": list(
                    {(one["strategy"], one["mesh"]): one for one in sorted(close, key=_fullness)[::-1]}.values()
                ),
            }
        )
    return found


def _fullness(one: Mapping[str, Any]) -> int:
    return one["peak_bytes"]


def _shown(one: placement_search.Candidate) -> dict[str, Any]:
    assert one.needs is not None, "it fits"
    return {
        "strategy": one.strategy,
        "mesh": one.mesh,
        "remat": one.remat,
        "micro_batch": one.needs.micro_batch,
        "peak_bytes": one.needs.peak,
    }


def describe(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each packing under which something fits, else one that says that nothing does."""
    lines = []
    for remedy in found:
        flags = " ".join(f"--config.{path}={value}" for path, value in remedy["assignments"].items())
        close = f"; close to it: {_places(remedy['close'])}" if remedy["close"] else ""
        if remedy["fits"]:
            lines.append(f"weights in {remedy['bits']} fit, by arithmetic: {flags}: {_places(remedy['fits'])}{close}")
        elif close:
            lines.append(f"weights in {remedy['bits']} may fit, by arithmetic: {flags}{close}")
    if found and not lines:
        words = " or ".join(remedy["bits"] for remedy in found)
        lines.append(f"weights in {words} would not fit either, by arithmetic")
    return lines


def _places(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{one['strategy']} {one['mesh']} {bytes_of(one['peak_bytes'])}" for one in rows)
