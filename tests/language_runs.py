"""Folders of a language model's runs, written without training."""

import json
from pathlib import Path
from typing import Any

from configs import base
from lw_jax.core import config
from lw_jax.report import language
from lw_jax.training import run_folder
from tests.runs import write_lines

LENGTH, BATCH, STEPS = 24, 40, 70
LOSS, UNIGRAM, BIGRAM = 2.5, 3.25, 2.75
COMMAND = ["run.py", "--config", "my own.py", "--config.train.steps=70"]
POSITIONS = {"9-16": 2.0, "1-1": 4.0, "17-24": 1.5, "2-2": 3.5, "3-4": 3.0, "5-8": 2.5}


def metrics() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(10, STEPS + 1, 10):
        row = {"step": step, "train/loss": 50 / step, "train/learning_rate": 1e-4 * step}
        rows.append(row | {"train/seconds_per_step": 1 / step, "train/tokens_per_second": 100.0 * step})
    for step in (35, STEPS):
        row = {"step": step, "validation/loss": LOSS if step == STEPS else 9.0, "validation/nll/lm": LOSS}
        row |= {"validation/nll/unigram": UNIGRAM, "validation/nll/bigram": BIGRAM}
        row |= {f"validation/inner/{name}": 3.0 + i for i, name in enumerate(language.INNER)}
        rows.append(row | {f"validation/detail/position/{name}": value for name, value in POSITIONS.items()})
    return rows


def row_of(kind: str, name: str, devices: int, rate: float | None, **changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": kind, "scaling": name, "target": "h100" if kind == "planned" else "cpu"}
    told |= {"devices": devices, "length": LENGTH, "global_batch": BATCH, "micro_batch": 5, "accumulation": 2}
    told |= {"remat": "none", "tokens_per_second": rate, "step_seconds": rate and BATCH * LENGTH / rate}
    told |= {"peak_bytes": 7e9, "weights_bytes": 1e9, "optimizer_bytes": 2e9, "activation_bytes": 4e9, "obstacle": None}
    told |= {"peak_from": "compiled", "parameters": 120, "config": "configs/ttt/ttt_smoke.py", "mfu": None}
    if kind == "measured":
        told |= {
            "step_seconds_least": 0.9 * BATCH * LENGTH / (rate or 1),
            "step_seconds_most": BATCH * LENGTH / (rate or 1),
        }
    return told | changes


def write_run(folder: Path, *, rows: list[dict[str, Any]] | None = None, changes: dict[str, Any] | None = None) -> Path:
    values = base.get_config("ttt")
    own = {
        "ttt.length": LENGTH,
        "train.global_batch": BATCH,
        "train.steps": STEPS,
        "optim.warmup_steps": 3,
    }
    values.update_from_flattened_dict(own | (changes or {}))
    cfg = config.build(values)
    run_folder.write_workdir(folder, cfg=cfg, base=base.get_config("ttt").to_dict(), command=COMMAND)
    write_lines(folder / "metrics.jsonl", metrics())
    leaves = {"trainable/embed": [[10, 7], "float32"], "trainable/norm": [[50], "bfloat16"], "step": [[], "int32"]}
    leaves |= {"opt_state/mu": [[10, 7], "float32"], "opt_state/on": [[3], "bool"]}
    for step, found in ((9, {}), (70, leaves)):
        saved = folder / "checkpoints" / str(step)
        saved.mkdir(parents=True, exist_ok=True)
        (saved / "record.json").write_text(json.dumps({"record": {"leaves": found}}), "utf-8")
    if rows is not None:
        (folder / "scaling.json").write_text(json.dumps(rows), "utf-8")
    return folder
