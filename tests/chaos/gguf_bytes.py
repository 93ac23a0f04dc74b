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
            i = draw(st.integers(0, len(parsed.fields) - 1))
            what = draw(st.sampled_from(("value", "value", "value", "drop", "twice", "rename", "item")))
            if what == "value":
                parsed.fields[i][1:] = draw(st.sampled_from(_WRONG))
            elif what == "item" and parsed.fields[i][1] == _ARRAY and parsed.fields[i][2][1]:
                item, values = parsed.fields[i][2]
                parsed.fields[i][2] = (item, values[: draw(st.integers(0, len(values) - 1))])
            elif what == "rename":
                parsed.fields[i][0] += b"x"
            elif what == "twice":
                parsed.fields.append(parsed.fields[i])
            else:
                del parsed.fields[i]
        elif part == "tensor" and parsed.tensors:
            i = draw(st.integers(0, len(parsed.tensors) - 1))
            what = draw(st.sampled_from(("dims", "kind", "offset", "name", "drop", "twice", "rank")))
            one = parsed.tensors[i] = list(parsed.tensors[i])
            if what == "dims" and one[1]:
                place, dim = draw(st.integers(0, len(one[1]) - 1)), draw(st.sampled_from(_VALUES))
                one[1] = [dim if k == place else old for k, old in enumerate(one[1])]
            elif what == "kind":
                one[2] = draw(st.integers(0, 40))
            elif what == "offset":
                one[3] = draw(st.sampled_from([*_VALUES, one[3] + 1, one[3] + 4, one[3] + 32, max(one[3] - 32, 0)]))
            elif what == "name":
                one[0] = draw(st.sampled_from((b"", b"x", b"\xff", one[0] + b".x")))
            elif what == "rank":
                one[1] = draw(st.sampled_from(([], [1, *one[1]], [*one[1], 1])))
            elif what == "twice":
                parsed.tensors.append(one)
            else:
                del parsed.tensors[i]
        else:
            counts = draw(st.sampled_from(((1, 0), (0, 1), (-1, 0), (2**40, 0), (0, 2**40))))
    return parsed.write(counts)


def with_field(sample: bytes, key: bytes, kind: int, value: Any) -> bytes:
    """Returns the file with one field set or added."""
    parsed = Parsed(sample)
    parsed.fields = [field for field in parsed.fields if field[0] != key] + [[key, kind, value]]
    return parsed.write()
