"""Typed decoding of JSON and other untrusted values: the one place where data from outside becomes typed data.

msgspec decodes and checks in one pass: wrong types, missing fields, NaN, numbers out of range, lone surrogates and
broken UTF-8 are refused. Bounds belong into the type: `Annotated[int, msgspec.Meta(ge=1, le=4096)]`.
"""

import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from lw_jax.core.errors import UserError

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # of an array's axis
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
JSON_BYTES = 256 << 20  # what is read at once; the largest of a model's files, a tokenizer.json, has some 35 MB

_T = TypeVar("_T")
_ERROR = re.compile(r"(?P<rule>.*?)(?: - at `(?P<path>\$.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]|(?P<other>.)")
_UNKNOWN = re.compile(r".*unknown field (?P<name>.*)", re.DOTALL)
_SHOWN, _NAMES = 60, 300  # characters of a value, and of the names of fields, in a message
_SEARCHED = 16 << 20  # bytes of a document that is decoded again, untyped, to show a refused value
_BYTE = re.compile(r"\(byte (\d+)\)")


def decode(data: bytes | str, kind: type[_T] | Any, *, where: str, remedy: str) -> _T:
    """Returns JSON as an instance of `kind`.

    Args:
      data: one JSON document.
      kind: a msgspec.Struct, a TypedDict, or any type that msgspec knows.
      where: the file and row, for messages.
      remedy: what the user can do.

    Raises:
      UserError: names where, the field, its value, the rule and the remedy.
    """

    def parse() -> Any:
        return msgspec.json.decode(data) if len(data) <= _SEARCHED else None

    return _checked(lambda: _decoder(kind).decode(data), parse, kind, where, remedy, data)


def convert(value: Any, kind: type[_T] | Any, *, where: str, remedy: str) -> _T:
    """Returns a value that another library has parsed as an instance of `kind`; raises as `decode` does."""
    return _checked(lambda: msgspec.convert(value, kind), lambda: value, kind, where, remedy)


def read(path: Path, kind: type[_T] | Any, *, remedy: str) -> _T:
    """Returns a file of one JSON document as an instance of `kind`; of at most JSON_BYTES.

    Raises:
      UserError: as `decode`, or the file is too large or cannot be read. FileNotFoundError is the caller's.
    """
    try:
        size = path.stat().st_size
        if size > JSON_BYTES:
            raise UserError(f"{path}: {size:,} bytes, at most {JSON_BYTES:,} are read; {remedy}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from error
    return decode(data, kind, where=str(path), remedy=remedy)


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> Any:
    """Returns what decodes a type, made once: `msgspec.json.decode` works the type out anew for each row of a file."""
    return msgspec.json.Decoder(kind)


def _checked(  # noqa: PLR0913
    make: Callable[[], _T], parse: Callable[[], Any], kind: Any, where: str, remedy: str, data: bytes | str = b""
) -> _T:
    try:
        return make()
    except msgspec.ValidationError as error:
        match = _ERROR.fullmatch(str(error))
        assert match is not None
        path, rule = match["path"] or "", match["rule"].replace("`", "")
        named = path.removeprefix("$").removeprefix(".")
        if "missing required field" in rule:  # of the object itself its fields say more than the first of their values
            fields = _shown(parse, path, lambda value: ", ".join(map(repr, value)) or "none", _NAMES)
            field, rule = f"{named}: " * bool(named), f"{rule}, found {fields}"
        else:
            field = f"{named}={_shown(parse, path, repr, _SHOWN)}: " * bool(named)
            rule += _suggestion(rule, kind)
        raise UserError(f"{where}: {field}{rule[:1].lower()}{rule[1:]}; {remedy}") from error
    except msgspec.DecodeError as error:
        reason = _BYTE.sub(lambda match: _line_of(data, int(match[1])), str(error))
        raise UserError(f"{where}: broken JSON or a lone surrogate ({reason}); {remedy}") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        near = error.object[max(0, error.start - _SHOWN) : error.end]  # its place in the file is not known
        raise UserError(f"{where}: not UTF-8 ({error.reason}, at the end of {near!r}); {remedy}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply to be read; {remedy}") from error


def _suggestion(rule: str, kind: Any) -> str:
    match = _UNKNOWN.fullmatch(rule)
    if match is None:
        return ""
    objects = msgspec.json.schema(kind)["$defs"].values()
    known = [name for each in objects for name in each.get("properties", ())]
    close = difflib.get_close_matches(match["name"], known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _line_of(data: bytes | str, offset: int) -> str:
    before = (data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)[:offset]
    number = before.count(b"\n") + 1
    column = offset - before.rfind(b"\n")
    return f"(line {number}, byte {column})" if number > 1 else f"(byte {column})"


def _shown(parse: Callable[[], Any], path: str, show: Callable[[Any], str], most: int) -> str:
    try:
        value = parse()
        for step in _STEP.finditer(path.removeprefix("$")):
            value = value[step["name"] if step["name"] else int(step["index"])]
        shown = show(value)
    # "[...]" is some key or value of a mapping; an integer of thousands of digits has no repr.
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, ValueError):
        return "..."
    return shown if len(shown) <= most else f"{shown[:most]}..."
