"""Results of an evaluation: the types of eval.json as it is written and read, and what a page calls its figures."""

import dataclasses
import operator
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from lw_jax.core.eval_rows import OF_CACHE
from lw_jax.core.schema import Index, Size

REFERENCE_ROWS = ("text", "none")  # control rows that a curve is compared with
MODEL = "language model"  # the coding of a text by a language model's own probabilities, among the texts' bytes
PLAIN = "UTF-8"  # the coding that the others are compared with
MOST_READERS = 64  # panels of a picture

Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]
Known = Figure | None  # null where it is not finite
Positive = Annotated[float, Meta(gt=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Word = Annotated[str, Meta(max_length=10_000)]
Interval = tuple[Known, Known] | None


class Column(NamedTuple):
    """A figure as a page shows it."""

    label: str
    unit: str = ""
    scale: float = 1
    interval: bool = False  # under NAME_interval
    digits: int | None = None  # None: as many as the scale needs

    @property
    def heading(self) -> str:
        return f"{self.label}, {self.unit}" if self.unit else self.label


ROW = {  # figures of a row of the control table
    "positions": Column("reader positions", digits=1),
    "first_token_seconds": Column("first answer token", "ms", 1000, digits=1),
    "em": Column("EM", "%", 100, True),
    "f1": Column("F1", "%", 100, True),
    "nll": Column("NLL", "nats a token", 1, True),
    "accuracy": Column("token accuracy", "%", 100),
    "first_token": Column("first token", "%", 100, True),
    "first_5": Column("first token in top 5", "%", 100),
    "distinct": Column("distinct answers", "%", 100),
    "examples": Column("examples", digits=0),
}
MESSAGE = {  # figures of a reader's messages
    "fewer_positions": Column("fewer reader positions, x"),
    "bytes_a_token": Column("bytes a token of the text", digits=0),
    "write_seconds": Column("written in", "s", digits=2),
    "open_seconds": Column("its bytes opened in", "ms", 1000, digits=1),
}
COMPARISON = {  # figures of `comparison.compare`
    "normalised_f1": Column("normalised F1", "%", 100, True),
    "recovered_nll": Column("recovered NLL", "%", 100, True),
    "own_f1": Column("F1 beyond another text's message", "%", 100, True),
    "own_nll": Column("NLL beyond another text's message", "%", 100, True),
    "gap_f1": Column("gap of F1", "points", 100, True),
    "gap_nll": Column("gap of NLL", "nats a token", 1, True),
    "follows": Column("follows a changed message, of changed texts followed", "%", 100, True),
}
COMPARISON |= {  # the same shares of a cache's rows
    f"{name}_{row}": COMPARISON[name]._replace(label=f"{COMPARISON[name].label} of row {row}")
    for row in OF_CACHE
    for name in ("normalised_f1", "recovered_nll")
}


def _figures(columns: dict[str, Column], **others: Any) -> dict[str, Any]:
    intervals = {f"{name}_interval": Interval for name, column in columns.items() if column.interval}
    return dict.fromkeys(columns, Known) | intervals | others


# Absent is what was not measured; null is what is not finite, or has no meaning here.
Row = TypedDict("Row", _figures(ROW, texts=Count, follows=Known, follows_interval=Interval), total=False)  # pyright: ignore
Comparison = TypedDict(  # pyright: ignore
    "Comparison",
    _figures(
        MESSAGE | COMPARISON,
        examples=Count,
        texts=Count,
        upper=Word,
        faster=Known,
        timed_tokens=Count,
        timed_ratio=Count,
    )
    | {f"{name}_reason": Word for name in COMPARISON},
    total=False,
)


class Score(TypedDict):
    """Scores of joint answers, or of one reader's."""

    em: Known
    em_interval: Interval
    f1: Known
    f1_interval: Interval
    picked: NotRequired[Known]


class Joint(TypedDict):
    """Joint answers of all readers."""

    joint: Score
    oracle: Score
    readers: dict[Word, Score]
    agreement: Known
    agreement_interval: Interval
    examples: Count


class Geometry(TypedDict, total=False):
    """Rank and cosines of the latents."""

    inputs: Count
    effective_rank: Known
    effective_rank_uncentred: Known
    input_cosine: Known
    slot_cosine: Known


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


class Results(TypedDict):
    """eval.json."""

    step: Index
    validation: Word
    rows: Annotated[dict[Word, dict[Word, Row]], Meta(max_length=64)]  # reader -> row -> figures
    readers: Annotated[dict[Word, Comparison], Meta(max_length=64)]
    joint: Joint | None
    latents: Geometry
    curve: Curve | None
    counts: dict[Word, Count]
    settings: NotRequired[dict[Literal["max_new_tokens", "taught_steps"], Count]]  # of the configuration's section eval


_ENCODER = msgspec.json.Encoder(enc_hook=operator.methodcaller("item"))  # of numpy's scalars


def to_json(value: Any) -> str:
    """Returns a value as one line of JSON; NaN and infinities, which JSON cannot hold, are null."""
    return _ENCODER.encode(value).decode()
