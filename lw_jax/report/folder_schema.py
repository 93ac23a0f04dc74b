"""Types of the files in a run's folder, as training and benchmarks write them and the page reads them.

Fields that the page does not show are not listed; they are allowed and ignored.
"""

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from lw_jax.core.schema import Index, Size
from lw_jax.evals.curve import Count, Figure, Known, Positive, Word


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
