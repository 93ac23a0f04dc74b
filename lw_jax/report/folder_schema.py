"""Types of the files in a run's folder, as training, evaluation and benchmarks write them and the page reads them.

Fields that the page does not show are not listed; they are allowed and ignored.
"""

from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from lw_jax.core.schema import Index, Size

Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]
Known = Figure | None  # null where it is not finite
Positive = Annotated[float, Meta(gt=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Word = Annotated[str, Meta(max_length=10_000)]
Interval = tuple[Known, Known] | None


class Row(TypedDict):
    """One reader's figures for one of its rows."""

    positions: NotRequired[Known]  # absent in files of earlier versions
    em: Known
    f1: Known
    nll: Known
    accuracy: Known
    first_token: Known
    first_5: Known
    distinct: Known
    em_interval: Interval
    f1_interval: Interval
    nll_interval: Interval
    first_token_interval: Interval
    examples: Count
    texts: NotRequired[Count]  # absent in files of earlier versions
    first_token_seconds: NotRequired[Known]
    follows: NotRequired[Known]
    follows_interval: NotRequired[Interval]


class Between(TypedDict, total=False):
    """One reader's comparison of its rows; absent where a row was not measured."""

    examples: Count
    texts: Count
    normalised_f1: Known
    normalised_f1_interval: Interval
    normalised_f1_reason: Word
    recovered_nll: Known
    recovered_nll_interval: Interval
    recovered_nll_reason: Word
    gap_f1: Known
    gap_f1_interval: Interval
    gap_nll: Known
    gap_nll_interval: Interval
    upper: Word
    fewer_positions: Known
    faster: Known
    timed_tokens: Count
    follows: Known
    follows_interval: Interval
    follows_reason: Word


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
    """One reader's figures at one size of message."""

    slots: Size | Positive
    ratio: NotRequired[Size]
    width: Size
    bits: Literal[16, 8, 6, 4, 2]
    reader: Word
    examples: Count
    positions: NotRequired[Positive]
    payload_bytes: Count
    framed_bytes: Positive
    nll: NotRequired[Known]
    nll_low: NotRequired[Known]
    nll_high: NotRequired[Known]
    accuracy: NotRequired[Known]
    em: NotRequired[Known]
    f1: NotRequired[Known]
    f1_low: NotRequired[Known]
    f1_high: NotRequired[Known]


class Reference(TypedDict, total=False):
    """A reference row of the curve."""

    nll: Known
    f1: Known


class References(TypedDict, total=False):
    """One reader's rows beside the curve: `evals.curve.REFERENCE_ROWS`."""

    text: Reference
    none: Reference


class Curve(TypedDict):
    """Quality by size of message."""

    quality: Literal["nll", "f1"]
    examples: Count
    points: Annotated[list[Point], Meta(min_length=1, max_length=100_000)]
    references: Annotated[dict[Word, References], Meta(max_length=64)]


# by coding; "UTF-8" is the base of the shares
TextBytes = TypedDict(
    "TextBytes",
    {
        "UTF-8": Positive,
        "gzip": NotRequired[Positive],
        "zstd": NotRequired[Positive],
        "brotli": NotRequired[Positive],
        "language model": NotRequired[Positive],
    },
)


class Evaluation(TypedDict):
    """eval.json."""

    step: Index
    validation: NotRequired[Word]  # absent in files of earlier versions
    rows: Annotated[dict[Word, dict[Word, Row]], Meta(max_length=64)]
    readers: Annotated[dict[Word, Between], Meta(max_length=64)]
    joint: Joint | None
    latents: Geometry
    curve: Curve | None
    text_bytes: TextBytes | None  # null without a curve
    counts: dict[Word, Count]


class Prediction(TypedDict):
    """A row of predictions.jsonl."""

    reader: str
    row: str
    index: Index
    question: str
    answers: list[str]
    prediction: str
    em: Known
    f1: Known


class Device(TypedDict):
    """A row of devices.jsonl: means over `samples` samples."""

    device: Word
    samples: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    seconds: Annotated[float, Meta(ge=0, le=1e12)]
    utilisation: NotRequired[Figure]
    memory_bytes: NotRequired[Figure]
    card_bytes: NotRequired[Figure]
    celsius: NotRequired[Figure]
    watts: NotRequired[Figure]
    peak_bytes: NotRequired[Figure]
    limit_bytes: NotRequired[Figure]


class Hardware(TypedDict, total=False):
    """hardware.json: the run's last devices."""

    devices: Index
    kind: Word  # platform
    card: Word  # empty for a CPU


class Scaling(TypedDict):
    """A row of scaling.json, which benchmarks/scaling.py writes."""

    kind: Word
    scaling: Word
    target: Word
    devices: Size
    length: Size
    global_batch: Size
    micro_batch: Index | None
    accumulation: Index | None
    remat: Word | None
    step_seconds: Positive | None
    step_seconds_least: NotRequired[Positive]
    step_seconds_most: NotRequired[Positive]
    tokens_per_second: Positive | None
    peak_bytes: Known
    weights_bytes: Known
    optimizer_bytes: Known
    activation_bytes: Known
    peak_from: Word | None
    parameters: Count
    config: Word
    obstacle: Word | None
    mfu: Known


Shape = Annotated[list[Index], Meta(max_length=8)]
Dtype = Annotated[str, Meta(pattern=r"^(bool|[a-z]+[0-9]{1,3}(_[a-z0-9]+)?)$")]


class Leaves(TypedDict):
    """The part of a checkpoint's record.json that the page shows."""

    leaves: dict[Word, tuple[Shape, Dtype]]


class Saved(TypedDict):
    """A checkpoint's record.json."""

    record: Leaves


Slots = Annotated[list[Annotated[list[Known], Meta(max_length=4096)]], Meta(max_length=4096)]
