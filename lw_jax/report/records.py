"""Contents of a run's folder for its page; missing files are empty."""

import dataclasses
import math
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from lw_jax.core import schema
from lw_jax.core.command_line import PROGRAM
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.schema import Index, Size
from lw_jax.evals.results import Count, Curve, Known, Positive, Results, Word
from lw_jax.training.run_folder import EVALUATION, read_config, read_devices, read_metrics, read_typed_rows

TEXTS = ("config.diff", "command.txt", "versions.json")
REMEDY = "the file must be as this version writes it: remove it, or write it anew with its command"
LARGEST = 1e30  # drawable; beyond it a logged value counts as infinite


# --- types of the files, as training and benchmarks write them; fields that the page does not show are ignored


class Prediction(TypedDict):
    """A row of predictions.jsonl."""

    reader: str
    row: str
    index: Index
    id: str
    question: str
    answers: list[str]
    prediction: str
    em: Known
    f1: Known


class Hardware(TypedDict, total=False):
    """hardware.json: the run's last devices."""

    devices: Index
    kind: Word  # platform
    card: Word  # empty for a CPU
    since_step: Index  # they are those of the steps behind it
    since_time: Annotated[float, Meta(ge=0, le=LARGEST)]


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


@dataclasses.dataclass(frozen=True)
class Run:
    """One run's folder at one moment."""

    workdir: Path
    cfg: Config
    metrics: list[dict[str, Any]]
    logged: datetime | None  # when the last of them was written
    evaluation: dict[str, Any]
    predictions: list[dict[str, Any]]
    slots: list[list[float]]
    devices: list[dict[str, Any]]
    hardware: dict[str, Any]  # what it ran on last, of hardware.json
    scaling: list[dict[str, Any]]  # of benchmarks/scaling.py
    leaves: dict[str, Any]  # path -> (shape, dtype) in the newest checkpoint
    texts: dict[str, str]  # of TEXTS, those that are there

    def command(self, verb: str, *flags: str) -> str:
        return f"{PROGRAM} {shlex.join((verb, '--workdir', str(self.workdir), *flags))}"

    @property
    def training(self) -> str:
        command = self.texts.get("command.txt", "").strip()
        called = f"python {command}" if command.startswith("run.py") else command
        return called or self.command("train", "--config", "FILE")

    @property
    def last_devices(self) -> list[dict[str, Any]]:
        """Samples of the devices on which the run goes on, without those that it has left."""
        return [row for row in self.devices if row.get("time", 0) >= self.hardware.get("since_time", 0)]

    @property
    def curve(self) -> Curve | None:
        curve = self.evaluation.get("curve")
        return _to_nan(curve) if curve else None


def read(workdir: Path) -> Run:
    """Returns the folder's contents.

    Raises:
      UserError: not a run's folder, or a file that is not as training or evaluation writes it.
    """
    log, predictions = workdir / "metrics.jsonl", workdir / "predictions.jsonl"
    return Run(
        workdir=workdir,
        cfg=read_config(workdir),
        metrics=read_metrics(log) if log.exists() else [],
        logged=datetime.fromtimestamp(log.stat().st_mtime, UTC) if log.exists() else None,
        evaluation=_read(workdir / EVALUATION, Results, {}),
        predictions=read_typed_rows(predictions, Prediction, remedy=REMEDY) if predictions.exists() else [],
        slots=_read_slots(workdir / "slots.json"),
        devices=read_devices(workdir),
        hardware=_read(workdir / "hardware.json", Hardware, {}),
        scaling=_read(workdir / "scaling.json", list[Scaling], []),
        leaves=_read_leaves(workdir / "checkpoints"),
        texts={name: _read_text(workdir / name) for name in TEXTS if (workdir / name).exists()},
    )


def to_number(value: Any) -> float:
    """Returns a logged number: NaN for null; "nan" and "inf" are strings, for JSON has neither."""
    number = float("nan") if value is None else float(value)
    return math.copysign(math.inf, number) if abs(number) > LARGEST else number


def _read(path: Path, kind: Any, otherwise: Any) -> Any:
    try:
        return schema.read(path, kind, remedy=REMEDY)
    except FileNotFoundError:
        return otherwise


def _read_slots(path: Path) -> list[list[float]]:
    """Returns the square matrix of cosines between slots; NaN for null."""
    matrix = _read(path, Slots, [])
    if any(len(row) != len(matrix) for row in matrix):
        raise UserError(f"{path}: {len(matrix)} rows, not all of {len(matrix)} values; {REMEDY}")
    return _to_nan(matrix)


def _read_leaves(folder: Path) -> dict[str, Any]:
    """Returns the shapes of the newest complete checkpoint, which has its final name."""
    steps = [path for path in folder.glob("*/record.json") if path.parent.name.isdecimal()]
    newest = max(steps, key=lambda path: int(path.parent.name), default=None)
    return _read(newest, Saved, {"record": {"leaves": {}}})["record"]["leaves"] if newest else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")  # shown, never interpreted
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {REMEDY}") from error


def _to_nan(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{k: _to_nan(inner) for k, inner in vars(value).items()})
    if isinstance(value, dict):
        return {key: _to_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_nan(inner) for inner in value]
    return float("nan") if value is None else value
