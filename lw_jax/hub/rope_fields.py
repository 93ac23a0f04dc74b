"""Rotary fields of a config.json: checked, read as frequency scaling, and written."""

import math
from collections.abc import Mapping, Set
from typing import Any

from lw_jax.core.errors import UserError
from lw_jax.hub.config_json import Decoder, Rope, is_stated
from lw_jax.models.rotary import Llama3Scaling, LongRope

PARTIAL = "partial_rotary_factor"
_ROPE_FIELDS = {  # kind -> (required, optional), besides rope_theta
    "default": ((), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor", "original_max_position_embeddings")),
}


def check(raw: Mapping[str, Any], rope: Rope, kinds: Set[str], *, partial: bool, where: str) -> None:
    """Refuses rotary fields that a family with these kinds does not have, and missing ones."""
    kind = rope.kind
    if kind not in kinds:
        raise UserError(f"{where}: rope_type={kind!r}, only {sorted(kinds)} are supported")
    needed, optional = _ROPE_FIELDS[kind]
    known = {"rope_type", "type", "rope_theta", PARTIAL, *needed, *optional}
    if unknown := sorted(key for key in set(raw) - known if is_stated(raw[key])):
        field = f"{unknown[0]}={raw[unknown[0]]!r:.80}"
        raise UserError(f"{where}: rope field {field} is not known for rope_type {kind!r}")
    if not partial and rope.partial_rotary_factor not in (None, 1.0):
        raise UserError(f"{where}: {PARTIAL}={rope.partial_rotary_factor!r}, only 1.0 is supported")
    if missing := [key for key in needed if getattr(rope, key) is None]:
        raise UserError(f"{where}: rope field {missing[0]} is missing; rope_type {kind!r} needs it")


def read_scaling(rope: Rope, stated: Decoder, rotated: int, where: str) -> Llama3Scaling | LongRope | None:
    if rope.kind == "longrope":
        return _long_rope(rope, stated, rotated, where)
    if rope.kind != "llama3":
        return None
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    assert rope.factor and low and high and original  # checked by `check`
    if low >= high:
        raise UserError(f"{where}: rope fields low_freq_factor={low}, high_freq_factor={high}: the second is larger")
    return Llama3Scaling(
        factor=float(rope.factor), low_freq_factor=low, high_freq_factor=high, original_max_positions=original
    )


def _long_rope(rope: Rope, stated: Decoder, rotated: int, where: str) -> LongRope:
    """Returns the scaling as transformers computes it: its gain follows from the extension of the context."""
    key = "original_max_position_embeddings"
    inner, outer = rope.original_max_position_embeddings, stated.original_max_position_embeddings
    if inner and outer and inner != outer:
        raise UserError(f"{where}: {key}={outer}, and {inner} among the rotary fields; one is wrong")
    original = inner or outer
    if not original:
        raise UserError(f"{where}: {key} is missing; rope_type 'longrope' needs it")
    if original == 1 and rope.attention_factor is None:
        rule = "its gain needs more than 1; correct the field, or state attention_factor"
        raise UserError(f"{where}: {key}={original}: {rule}")
    short, long = rope.short_factor or (), rope.long_factor or ()
    for key, value in (("short_factor", short), ("long_factor", long)):
        if len(value) != rotated // 2:
            rule = f"one for each of {rotated // 2} rotary frequencies is needed"
            raise UserError(f"{where}: rope field {key} has {len(value)} numbers; {rule}")
    extension = rope.factor or stated.max_position_embeddings / original
    gain = rope.attention_factor
    if gain is None:
        gain = _gain(extension, original)
    return LongRope(short, long, original, gain)


def _gain(extension: float, original: int) -> float:
    return math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 else 1.0


def write_scaling(scaling: Llama3Scaling | LongRope, max_positions: int = 0) -> dict[str, Any]:
    """Returns the fields of `rope_scaling`; `max_positions` are a LongRope model's."""
    if isinstance(scaling, LongRope):
        original = scaling.original_max_positions
        implied = original > 1 and scaling.gain == _gain(max_positions / original, original)
        return {  # transformers 4 takes these three alone, in this spelling
            "type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
        } | ({} if implied else {"attention_factor": scaling.gain})
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
