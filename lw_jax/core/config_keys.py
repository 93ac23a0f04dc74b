"""Declaration of one configuration key: default, meaning, unit, and which values it may hold."""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, Literal, NoReturn

from lw_jax.core.errors import UserError

WHOLE = 2**31 - 1  # largest whole number
REAL = 1e15  # largest other number, on either side of 0
TEXT = 100_000  # characters of a text
_KEY = "key"


@dataclasses.dataclass(frozen=True)
class Key:
    """Metadata of a configuration key: documentation, unit and permitted values."""

    doc: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    optional: bool = False  # of a tuple with choices: it may be empty
    # What a plan depends on: the value, whether it is 0 or empty (a term, a mask or a frozen part), or neither.
    shapes: Literal["value", "zero", "no"] = "value"

    @property
    def range(self) -> str:
        """Returns the bounds in words; empty where there are none."""
        named = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        return " and ".join(f"{word} {bound:,}" for word, bound in named.items() if bound is not None)


def key(default: Any, doc: str, **rules: Any) -> Any:
    """Declares a key; `rules` are the other fields of `Key`."""
    return dataclasses.field(default=default, metadata={_KEY: Key(doc, **rules)})


def section(kind: type) -> Any:
    """Declares a section of keys."""
    return dataclasses.field(default_factory=kind)


def declared(field: dataclasses.Field[Any]) -> Key:
    """Returns what `key` declared."""
    return field.metadata[_KEY]


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean ...?' for the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def refuse(path: str, value: Any, rule: str) -> NoReturn:
    """Raises UserError for a value."""
    raise UserError(f"config.{path} = {value!r}: {rule}")


def check(path: str, value: Any, rule: Key) -> None:
    """Raises UserError where a value of the right type is not one that the key may hold."""
    many = isinstance(value, tuple)
    for one in value if many else (value,):
        _check_bounds(path, one, rule)
        if rule.choices and one not in rule.choices:
            refuse(path, one, f"must be one of {', '.join(rule.choices)}.{suggest(str(one), rule.choices)}")
    if many and rule.choices and (not value and not rule.optional or len(set(value)) < len(value)):
        fewest = "none" if rule.optional else "one"
        refuse(path, value, f"must name {fewest} or more of {', '.join(rule.choices)}, each once.")


def _check_bounds(path: str, value: Any, rule: Key) -> None:
    if isinstance(value, str):
        if len(value) > TEXT:
            refuse(path, f"{value[:40]}...", f"has {len(value):,} characters, must have at most {TEXT:,}.")
        if re.search("[\ud800-\udfff\x00]", value):
            refuse(path, value, "must be text that UTF-8 can hold, without a zero byte.")
        return
    limit = WHOLE if isinstance(value, int) else REAL
    if not math.isfinite(value) or abs(value) > limit:
        shown = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 10**40 else value
        refuse(path, shown, f"must be finite and at most {limit:,}.")
    low = rule.above is not None and value <= rule.above or rule.at_least is not None and value < rule.at_least
    high = rule.below is not None and value >= rule.below or rule.at_most is not None and value > rule.at_most
    if low or high:
        refuse(path, value, f"must be {rule.range}.")
