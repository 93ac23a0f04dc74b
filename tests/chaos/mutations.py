"""Mutations of valid input as hypothesis strategies: of JSON by its structure, of any file by its bytes."""

import copy
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Files = dict[str, bytes | None]  # what lies over a valid sample; None: the file is missing
Draw = Callable[[st.SearchStrategy[Any]], Any]

# What no value of Python stands for: written into the JSON text as it is.
RAW = {
    "@digits": "1" * 5000,
    "@fraction": "0." + "3" * 5000,
    "@overflow": "1e999",
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@deep-object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@surrogate": '"\\ud800"',
    "@surrogates": '"a\\udfff\\ud800 b"',
    "@control": '"\x01\x02"',
    "@zero": "-0",
    "@bare": "nothing",
}
_NUMBERS = [0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 10**20, -(10**20), 10**308]
_FLOATS = [0.5, -1.5, 1e-300, 1e300, 1e-9]
_TEXTS = ["", " ", "x", "None", "nan", "1", "-1", "a\x00b", "../../etc/passwd", "<script>alert(1)</script>", "{x!r}"]
_TEXTS += ["é" * 10, "\u2028", "\U0010ffff", "x" * 10_000, "{{ 1/0 }}", "float32"]
_NESTED: list[Any] = [[], {}, [[]], [None], [1], [1, 2, 3], ["x"], {"x": 1}, {"": None}, [{"x": [1]}], [True, 0.5, "x"]]
JUNK: list[Any] = [None, True, False, *_NUMBERS, *_FLOATS, *_TEXTS, *_NESTED, *RAW]


def text_of(value: Any, *, ascii_only: bool = True) -> str:
    """Returns a value as JSON text, the words of RAW as what they stand for."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    for word, raw in RAW.items():
        text = text.replace(json.dumps(word), raw)
    return text


def _junk(draw: Draw) -> Any:
    """Draws a value of JUNK: a copy, as it may be changed itself."""
    return copy.deepcopy(draw(st.sampled_from(JUNK)))


class _Pairs(dict[str, Any]):
    """An object that `json` writes with a key twice."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]):
        super().__init__(pairs)
        self._pairs = list(pairs)

    def items(self) -> Any:
        return self._pairs


def _walk(draw: Draw, root: Any) -> list[Any]:
    """Returns the keys that lead to a node, drawn by steps from the root so that long lists do not win."""
    path: list[Any] = []
    node = root
    while isinstance(node, dict | list) and node and (not path or draw(st.integers(0, 3))):
        keys = list(node) if isinstance(node, dict) else range(len(node))
        path.append(draw(st.sampled_from(keys)))
        node = node[path[-1]]
    return path


def _at(root: Any, path: Sequence[Any]) -> Any:
    for key in path:
        root = root[key]
    return root


def _change(draw: Draw, root: Any) -> Any:
    """Returns the document with one change at one place."""
    path = _walk(draw, root)
    if not path:
        return _junk(draw)
    holder, key = _at(root, path[:-1]), path[-1]
    kind = draw(st.sampled_from(("replace", "replace", "replace", "drop", "rename", "wrap", "copy", "twice", "swap")))
    if kind == "replace":
        holder[key] = _junk(draw)
    elif kind == "drop":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw(st.sampled_from((f"{key} ", key.upper(), "", "x", "@surrogate")))] = holder.pop(key)
    elif kind == "wrap":
        holder[key] = draw(st.sampled_from(([holder[key]], {"x": holder[key]}, [holder[key]] * 3)))
    elif kind == "copy" and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    elif kind == "swap" and isinstance(holder, dict):
        other = draw(st.sampled_from(list(holder)))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == "twice" and isinstance(holder, dict):
        pairs = _Pairs([*holder.items(), (key, _junk(draw))])
        if len(path) == 1:
            return pairs
        _at(root, path[:-2])[path[-2]] = pairs
    else:
        holder[key] = None
    return root


@st.composite
def json_text(draw: Draw, sample: Any) -> str:
    """Draws the sample with one to three changes, as JSON text."""
    root = json.loads(json.dumps(sample))
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(root, dict | list) or isinstance(root, _Pairs):
            break
        root = _change(draw, root)
    try:
        return text_of(root, ascii_only=draw(st.booleans()))
    except (ValueError, RecursionError):  # a change within a changed value
        return text_of(_junk(draw))


@st.composite
def json_file(draw: Draw, sample: bytes) -> bytes:
    return draw(json_text(json.loads(sample))).encode("utf-8", "surrogatepass")


@st.composite
def json_lines(draw: Draw, sample: bytes) -> bytes:
    """Draws JSON lines of which one or two are changed, doubled, emptied or cut."""
    lines = sample.split(b"\n")
    rows = [i for i, line in enumerate(lines) if line]
    for _ in range(draw(st.integers(1, 2))):
        i = draw(st.sampled_from(rows))
        kind = draw(st.sampled_from(("change", "change", "change", "cut", "double", "empty")))
        if kind == "change":
            changed = draw(json_text(json.loads(sample.split(b"\n")[i])))
            lines[i] = changed.encode("utf-8", "surrogatepass")
        elif kind == "cut":
            lines[i] = lines[i][: draw(st.integers(0, len(lines[i])))]
        else:
            lines[i] = lines[i] * 2 if kind == "double" else b""
    return b"\n".join(lines)


@st.composite
def changed_bytes(draw: Draw, sample: bytes, *, near: int = 0) -> bytes:
    """Draws a file with flipped, cut, inserted, repeated or zeroed bytes; half of them among the first `near`."""
    data = bytearray(sample)
    for _ in range(draw(st.integers(1, 3))):
        end = len(data) if not near or draw(st.booleans()) else min(near, len(data))
        at = draw(st.integers(0, max(end - 1, 0)))
        size = draw(st.sampled_from((1, 2, 4, 8, 100)))
        kind = draw(st.sampled_from(("flip", "flip", "cut", "insert", "repeat", "zero", "remove", "ones", "number")))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.sampled_from((b"\xff", b"\x00", b"\xed\xa0\x80", b"\n", b'"', b"{", b"\xef\xbb\xbf")))
        elif kind == "repeat":
            data[at:at] = data[at : at + size]
        elif kind == "remove":
            del data[at : at + size]
        elif kind == "number" and len(data) > at + 8:
            data[at : at + 8] = struct.pack("<q", draw(st.sampled_from((-1, 0, 1, 2**31, 2**40, 2**62))))
        else:
            data[at : at + size] = (b"\xff" if kind == "ones" else b"\x00") * size
    return bytes(data)


@st.composite
def files(draw: Draw, sample: Mapping[str, bytes], makers: Mapping[str, Sequence[Any]]) -> Files:
    """Draws changes of one or two of the named files, each by one of its makers, or its absence.

    Args:
      sample: the valid files.
      makers: file -> strategies of its changed bytes.
    """
    found: Files = {}
    for _ in range(1 if draw(st.integers(0, 5)) else 2):
        name = draw(st.sampled_from(list(makers)))
        found[name] = draw(st.one_of(list(makers[name]))) if draw(st.integers(0, 25)) else None
    return found
