"""Quantised weights that would fit where no placement does, estimated by arithmetic."""

import dataclasses
import operator

from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import DTYPES
from lw_jax.planning import placement_search
from lw_jax.planning.hardware import Hardware
from lw_jax.planning.plans import Remedy

CLOSE = 1.1  # of the limit; arithmetic is up to 12 % above what is compiled (two RTX 4090, nf4: 21.0 for 19.3 GB)
# Packing -> its name in messages, and the storage types that take more bits.
PACKINGS = {"int8": ("8 bits", (*DTYPES,)), "nf4": ("4 bits", (*DTYPES, "int8", "w8a8", "fp8"))}
_fullness = operator.attrgetter("peak_bytes")


def fewer_bits(cfg: Config, hardware: Hardware) -> tuple[Remedy, ...]:
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
        rows = sorted((one.candidate() for one in tried if one.needs), key=_fullness)
        fits = tuple(one for one in rows if one.fits)
        placed = {one.name for one in fits}
        close = {
            one.name: one  # the least full of each
            for one in rows[::-1]
            if one.name not in placed and one.peak_bytes <= CLOSE * hardware.limit.usable
        }
        assignments = {f"llms.{name}.weights": packing for name in names}
        found.append(Remedy(packing, words, assignments, fits, tuple(close.values())))
    return tuple(found)
