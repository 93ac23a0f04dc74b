"""Quality of answers by message size as plain values; a report reads them without JAX."""

import dataclasses
from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from lw_jax.core.schema import Size

REFERENCE_ROWS = ("text", "none")  # control rows that a curve is compared with
MODEL = "language model"  # the coding of a text by a language model's own probabilities, among the texts' bytes
PLAIN = "UTF-8"  # the coding that the others are compared with
MOST_READERS = 64  # panels of a picture

Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]
Known = Figure | None  # null where it is not finite
Positive = Annotated[float, Meta(gt=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Word = Annotated[str, Meta(max_length=10_000)]


class Point(TypedDict):
    """One reader's figures at one size of message; em and f1 are absent where nothing was generated."""

    slots: Size | Positive  # a mean where there is a ratio
    ratio: NotRequired[Size]  # source tokens a slot
    width: Size
    bits: Literal[16, 8, 6, 4, 2]
    payload_bytes: Count
    framed_bytes: Positive
    reader: Word
    examples: Count
    positions: Positive
    nll: NotRequired[Known]
    nll_low: NotRequired[Known]
    nll_high: NotRequired[Known]
    accuracy: NotRequired[Known]
    em: NotRequired[Known]
    f1: NotRequired[Known]
    f1_low: NotRequired[Known]
    f1_high: NotRequired[Known]


class Reference(TypedDict, total=False):
    """A reference row of the curve: its figures by the name of a quality."""

    nll: Known
    f1: Known


COLUMNS = tuple(Point.__annotations__)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Figures by message size and their references, all of the same examples.

    Raises ValueError where a figure that pictures show is absent.
    """

    quality: Literal["nll", "f1"]  # the configured one
    examples: Count
    points: Annotated[list[Point], Meta(min_length=1, max_length=100_000)]
    references: dict[Word, dict[Literal["text", "none"], Reference]]  # reader -> row of REFERENCE_ROWS -> figures
    text_bytes: dict[Word, Positive]  # coding -> mean bytes of a context

    def __post_init__(self) -> None:
        rows = [row for by_row in self.references.values() for row in by_row.values()]
        for name, entries in (("points", self.points), ("references", rows)):
            if not all(self.quality in row for row in entries):
                raise ValueError(f"a row of {name} has no {self.quality!r}, which the curve shows")
        if PLAIN not in self.text_bytes:
            raise ValueError(f"text_bytes has no {PLAIN!r}")
        if len({point["reader"] for point in self.points}) > MOST_READERS:
            raise ValueError(f"more than {MOST_READERS} readers")
