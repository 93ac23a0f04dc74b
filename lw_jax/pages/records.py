"""What a run's folder holds, read for a page; what is not there yet is empty."""

import dataclasses
import json
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lw_jax import figures
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.workdir import read_config, read_rows

EVALUATION = ("step", "rows", "readers", "joint", "latents", "curve", "text_bytes", "counts")
CURVE = ("quality", "examples", "points", "references")
PREDICTION = ("reader", "row", "index", "question", "answers", "prediction", "em", "f1")
DEVICE = ("device", "samples", "seconds")
SCALING = ("kind", "scaling", "target", "devices", "length", "global_batch", "micro_batch", "accumulation", "remat")
SCALING += ("step_seconds", "tokens_per_second", "peak_bytes", "weights_bytes", "optimizer_bytes", "activation_bytes")
SCALING += ("peak_from", "parameters", "config", "obstacle", "mfu")
TEXTS = ("config.diff", "command.txt", "versions.json")


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
        """Returns the command that makes something of this run."""
        return shlex.join(("python", "run.py", verb, "--workdir", str(self.workdir), *flags))

    @property
    def training(self) -> str:
        """The command that goes on training."""
        command = self.texts.get("command.txt", "").strip()
        return f"python {command}" if command else self.command("train", "--config", "FILE")

    @property
    def curve(self) -> figures.Curve | None:
        """The byte curve, where one was measured; NaN for what was no number."""
        told = self.evaluation.get("curve")
        if not told:
            return None
        return _to_nan(figures.Curve(**{key: told[key] for key in CURVE}, text_bytes=self.evaluation["text_bytes"]))


def read(workdir: Path) -> Run:
    """Returns what the folder holds.

    Raises:
      UserError: it is no run's, or a file is not as training or evaluation wrote it.
    """
    cfg = read_config(workdir)
    log = workdir / "metrics.jsonl"
    evaluation = _read_json(workdir / "eval.json", {})
    if evaluation:
        _check(workdir / "eval.json", evaluation, EVALUATION)
    if evaluation.get("curve"):
        _check(f"{workdir / 'eval.json'}: curve", evaluation["curve"], CURVE)
    return Run(
        workdir=workdir,
        cfg=cfg,
        metrics=_read_lines(log, ("step",)),
        logged=datetime.fromtimestamp(log.stat().st_mtime, UTC) if log.exists() else None,
        evaluation=evaluation,
        predictions=_read_lines(workdir / "predictions.jsonl", PREDICTION),
        slots=_to_nan(_read_json(workdir / "slots.json", [])),
        devices=[row for path in sorted(workdir.glob("devices*.jsonl")) for row in _read_lines(path, DEVICE)],
        hardware=_read_json(workdir / "hardware.json", {}),
        scaling=_read_scaling(workdir / "scaling.json"),
        leaves=_read_leaves(workdir / "checkpoints"),
        texts={name: (workdir / name).read_text("utf-8") for name in TEXTS if (workdir / name).exists()},
    )


def to_number(value: Any) -> float:
    """Returns a number as a log holds it: NaN for null, "nan" and "inf" for what JSON has no word for."""
    return float("nan") if value is None else float(value)


def _read_json(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return otherwise
    except ValueError as error:
        raise UserError(_fault(path, str(error))) from error


def _read_lines(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = read_rows(path) if path.exists() else []
    for number, row in enumerate(rows, 1):
        _check(f"{path}:{number}", row, keys)
    return rows


def _read_scaling(path: Path) -> list[dict[str, Any]]:
    rows = _read_json(path, [])
    if not isinstance(rows, list):
        raise UserError(_fault(path, "it is no list"))
    for number, row in enumerate(rows, 1):
        _check(f"{path}: row {number}", row, SCALING)
    return rows


def _read_leaves(folder: Path) -> dict[str, Any]:
    """Returns the shapes of the newest checkpoint that is whole; a record appears in its folder before a rename."""
    steps = [path for path in folder.glob("*/record.json") if path.parent.name.isdigit()]
    newest = max(steps, key=lambda path: int(path.parent.name), default=None)
    if newest is None:
        return {}
    told = _read_json(newest, {})
    _check(newest, told, ("record",))
    _check(newest, told["record"], ("leaves",))
    return told["record"]["leaves"]


def _check(where: Path | str, row: Any, keys: Iterable[str]) -> None:
    if not isinstance(row, dict):
        raise UserError(_fault(where, f"{row!r:.40} is no object of named values"))
    if missing := [key for key in keys if key not in row]:
        raise UserError(_fault(where, f"{missing[0]!r} is missing"))


def _fault(where: Path | str, what: str) -> str:
    return f"{where}: {what}: the file must be as this version writes it; remove it, or make it anew with its verb."


def _to_nan(value: Any) -> Any:
    """Returns nested values with NaN for every None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{k: _to_nan(inner) for k, inner in vars(value).items()})
    if isinstance(value, dict):
        return {key: _to_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_nan(inner) for inner in value]
    return float("nan") if value is None else value
