"""Declaration of one configuration key: default, meaning, unit, and which values it may hold."""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from lw_jax.core.errors import UserError

WHOLE = 2**31 - 1  # largest whole number
REAL = 1e15  # largest other number, on either side of 0
TEXT = 100_000  # characters of a text
_KEY = "key"
_SHOWN = 300  # characters of a refused value


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
    def bounds(self) -> dict[str, float]:
        named = {"above": self.above, "at_least": self.at_least, "below": self.below, "at_most": self.at_most}
        return {name: bound for name, bound in named.items() if bound is not None}

    @property
    def range(self) -> str:
        """Returns the bounds in words; empty where there are none."""
        return " and ".join(f"{name.replace('_', ' ')} {bound:,}" for name, bound in self.bounds.items())


def key(default: Any, doc: str, **rules: Any) -> Any:
    """Declares a key; `rules` are the other fields of `Key`."""
    return dataclasses.field(default=default, metadata={_KEY: Key(doc, **rules)})


def section(kind: type) -> Any:
    return dataclasses.field(default_factory=kind)


def declared(field: dataclasses.Field[Any]) -> Key:
    return field.metadata[_KEY]


def suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def refuse(path: str, value: Any, rule: str) -> NoReturn:
    try:
        shown = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        shown = f"a {type(value).__name__} with a number too long to be shown"
    raise UserError(f"config.{path} = {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}: {rule}")


def check(path: str, value: Any, hint: Any, rule: Key) -> Any:
    """Returns a key's value as its declared type: a list as a tuple, a whole number as a float where that is declared.

    Raises:
      UserError: it has another type, is out of range, or is none of the choices.
    """
    try:
        converted = msgspec.convert(value, _bounded(hint, rule))
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:  # the last of a lone surrogate
        reason = str(error).partition(" - at ")[0].replace("`", "")
        named = f"; it must be {rule.range}" if rule.range else ""
        refuse(path, value, f"{reason[:1].lower()}{reason[1:]}{named}.")
    if not rule.choices:
        return converted
    elements = converted if isinstance(converted, tuple) else (converted,)
    for element in elements:
        if element not in rule.choices:
            refuse(path, element, f"must be one of {', '.join(rule.choices)}.{suggest(str(element), rule.choices)}")
    if len(set(elements)) < len(elements) or not (elements or rule.optional):
        fewest = "none" if rule.optional else "one"
        refuse(path, converted, f"must name {fewest} or more of {', '.join(rule.choices)}, each once.")
    return converted


@functools.cache
def _bounded(hint: Any, rule: Key) -> Any:
    if typing.get_origin(hint) is tuple:
        return tuple[_bounded(typing.get_args(hint)[0], rule), ...]
    if hint is str:
        return Annotated[str, msgspec.Meta(max_length=TEXT, pattern="^[^\\ud800-\\udfff\\x00]*$")]
    limit = WHOLE if hint is int else REAL
    bounds: dict[str, Any] = {"gt": rule.above, "ge": rule.at_least, "lt": rule.below, "le": rule.at_most}
    if rule.above is rule.at_least is None:
        bounds["ge"] = -limit
    if rule.below is rule.at_most is None:
        bounds["le"] = limit
    return Annotated[hint, msgspec.Meta(**bounds)]
