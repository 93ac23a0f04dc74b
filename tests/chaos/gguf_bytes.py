"""A GGUF file as a list of parts that may be changed one by one, and written back right or wrong."""

import struct
from typing import Any

from hypothesis import strategies as st

_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_VALUES = [0, 1, 2, 3, 7, 31, 2**16, 2**31 - 1, 2**32 - 1, 2**62]
_WRONG: list[tuple[int, Any]] = [
    *((4, value) for value in (0, 1, 3, 2**31, 2**32 - 1)),
    *((11, value) for value in (-1, -(2**62), 2**62)),
    *((6, value) for value in (0.0, -1.0, float("nan"), float("inf"), 1e-30)),
    *((12, value) for value in (float("nan"), 1e300)),
    *((8, value) for value in (b"", b"x", b"\xff\xfe", b"llama", b"{{ 1/0 }}", b"a" * 3000)),
    *((9, value) for value in ((4, []), (8, []), (5, [1, -1, 3]), (8, [b"a", b"a"]), (6, [float("nan")]))),
    (7, True),
]


class Parsed:
    """version, fields [key, kind, value], tensors [name, dims, kind, offset], data."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 4
        self.version, count, fields = self._take("<I"), self._take("<Q"), self._take("<Q")
        self.fields = [self._field() for _ in range(fields)]
        self.tensors = [self._tensor() for _ in range(count)]
        alignment = next((value for key, _, value in self.fields if key == b"general.alignment"), 32)
        self.data = data[-(-self._at // alignment) * alignment :]
        self.alignment = alignment

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> bytes:
        size = self._take("<Q")
        self._at += size
        return self._data[self._at - size : self._at]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._take("<I"), self._take("<Q")
            return (item, [self._value(item) for _ in range(count)])
        return self._take(_FORMS[kind])

    def _field(self) -> list[Any]:
        key, kind = self._string(), self._take("<I")
        return [key, kind, self._value(kind)]

    def _tensor(self) -> list[Any]:
        name, rank = self._string(), self._take("<I")
        return [name, [self._take("<Q") for _ in range(rank)], self._take("<I"), self._take("<Q")]

    def write(self, counts: tuple[int, int] = (0, 0)) -> bytes:
        """Returns the file; `counts` are added to the numbers of tensors and fields that it says it has."""
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors) + counts[0], len(self.fields) + counts[1])
        for key, kind, value in self.fields:
            head += _text(key) + struct.pack("<I", kind) + _bytes(kind, value)
        for name, dims, kind, offset in self.tensors:
            head += _text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
            head += struct.pack("<IQ", kind, offset)
        return head + b"\0" * (-len(head) % self.alignment) + self.data


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _bytes(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value)
    if kind == _ARRAY:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(_bytes(item, one) for one in values)
    return struct.pack(_FORMS[kind], value)


@st.composite
def changed(draw: Any, sample: bytes) -> bytes:
    """Draws a file with one to three changed fields, tensors or counts."""
    parsed, counts = Parsed(sample), (0, 0)
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from(("field", "field", "field", "tensor", "tensor", "counts")))
        if part == "field" and parsed.fields:
            _change_field(draw, parsed.fields)
        elif part == "tensor" and parsed.tensors:
            _change_tensor(draw, parsed.tensors)
        else:
            counts = draw(st.sampled_from(((1, 0), (0, 1), (-1, 0), (2**40, 0), (0, 2**40))))
    return parsed.write(counts)


def _change_field(draw: Any, fields: list[list[Any]]) -> None:
    i = draw(st.integers(0, len(fields) - 1))
    key, kind, value = fields[i]
    what = draw(st.sampled_from(("value", "value", "value", "drop", "twice", "rename", "fewer")))
    if what == "value":
        fields[i] = [key, *draw(st.sampled_from(_WRONG))]
    elif what == "fewer" and kind == _ARRAY and value[1]:
        fields[i] = [key, kind, (value[0], value[1][: draw(st.integers(0, len(value[1]) - 1))])]
    elif what == "rename":
        fields[i] = [key + b"x", kind, value]
    elif what == "twice":
        fields.append(fields[i])
    else:
        del fields[i]


def _change_tensor(draw: Any, tensors: list[list[Any]]) -> None:
    i = draw(st.integers(0, len(tensors) - 1))
    name, dims, kind, offset = tensors[i]
    what = draw(st.sampled_from(("dims", "kind", "offset", "name", "drop", "twice", "rank")))
    if what == "drop":
        del tensors[i]
        return
    if what == "twice":
        tensors.append(tensors[i])
        return
    offsets = [*_VALUES, offset + 1, offset + 4, offset + 32, max(offset - 32, 0)]
    place, dim = draw(st.integers(0, max(len(dims) - 1, 0))), draw(st.sampled_from(_VALUES))
    tensors[i] = {
        "dims": [name, [dim if k == place else old for k, old in enumerate(dims)], kind, offset],
        "kind": [name, dims, draw(st.integers(0, 40)), offset],
        "offset": [name, dims, kind, draw(st.sampled_from(offsets))],
        "name": [draw(st.sampled_from((b"", b"x", b"\xff", name + b".x"))), dims, kind, offset],
        "rank": [name, draw(st.sampled_from(([], [1, *dims], [*dims, 1]))), kind, offset],
    }[what]


def with_field(sample: bytes, key: bytes, kind: int, value: Any) -> bytes:
    """Returns the file with one field set or added."""
    parsed = Parsed(sample)
    parsed.fields = [field for field in parsed.fields if field[0] != key] + [[key, kind, value]]
    return parsed.write()
