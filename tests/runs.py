"""Folders of runs as training and evaluation leave them, written without either."""

import json
from pathlib import Path
from typing import Any

from configs import base
from lw_jax.core import config, eval_rows
from lw_jax.report.figures import REFERENCES
from lw_jax.training import run_folder


def figures(value: float) -> dict[str, Any]:
    told: dict[str, Any] = {"em": value, "f1": value, "nll": 3 * (1 - value), "accuracy": value, "first_token": value}
    told |= {"first_5": value, "distinct": 0.8, "examples": 23, "tokens": 71.0, "positions": 12.5}
    told["texts"] = 23
    return told | {f"{key}_interval": [value / 2, value] for key in ("em", "f1", "nll", "first_token")}


def between(**changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"normalised_f1": 0.913, "recovered_nll": 0.872, "gap_f1": 0.31, "gap_nll": 1.234}
    told |= {"own_f1": 0.881, "own_nll": 0.845}
    told |= {f"{key}_interval": [value - 0.1, value + 0.1] for key, value in told.items()}
    return told | {"upper": "text", "fewer_positions": 3.125} | changes


def evaluation() -> dict[str, Any]:
    rows = {name: figures(0.1 * place) for place, name in enumerate(reversed(eval_rows.DEFAULT), 1)}
    references = {name: rows[name] for name in REFERENCES}
    point = {
        "slots": 5,
        "width": 7,
        "examples": 11,
        "payload_bytes": 35,
        "positions": 6.0,
        "nll_low": 0.1,
        "nll_high": None,
    }
    points = [
        point | {"reader": reader, "bits": bits, "framed_bytes": 22.0 + 5 * bits, "nll": 1 / bits, "accuracy": 0.5}
        for reader in ("llama", "qwen")
        for bits in (8, 2)
    ]
    score = {"em": 0.5, "em_interval": [0.4, 0.6], "f1": 0.6, "f1_interval": [0.5, 0.7]}
    return {
        "step": 31,
        "validation": "held.jsonl",
        "rows": {"llama": rows, "qwen": rows},
        "readers": {"llama": between(), "qwen": between(normalised_f1=0.2, recovered_nll=0.3)},
        "joint": {
            **{"joint": score, "oracle": score, "readers": {"llama": score | {"picked": 0.7}, "qwen": score}},
            **{"agreement": 0.25, "agreement_interval": [0.2, 0.3], "examples": 23, "unscored": 0},
        },
        "latents": {"inputs": 19, "effective_rank": 4.25, "effective_rank_uncentred": None, "input_cosine": 0.5},
        "curve": {
            "quality": "nll",
            "examples": 11,
            "points": points,
            "references": dict.fromkeys(("llama", "qwen"), references),
            "text_bytes": {"UTF-8": 117.0, "gzip": 101.0, "zstd": 97.0, "brotli": 89.0},
        },
        "counts": {"given": 29, "kept": 23, "question": 4, "answer": 0},
    }


def predictions(count: int = 43) -> list[dict[str, Any]]:
    found = []
    for reader in ("llama", "qwen"):
        for row in eval_rows.DEFAULT:
            for index in range(0, 3 * count, 3):
                right = row in ("text", "latents")
                record = {
                    "reader": reader,
                    "row": row,
                    "index": index,
                    "id": str(index),
                    "question": f"Question {index}?",
                }
                record |= {"answers": [f"gold {index}", "other"], "prediction": f"{row} {index}"}
                found.append(record | {"em": float(right), "f1": 1.0 if right else 0.5})
    return found


def metrics(*, steps: int = 30) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        task = "reconstruct/" if step <= steps // 3 else ""
        row = {"step": step, "train/loss": 3 / step, "train/learning_rate": 1e-3 * step}
        rows.append(row | {f"train/{task}nll/{reader}": 2 / step for reader in ("llama", "qwen")})
    names = [f"{other}nll/{reader}" for other in ("", "shuffled/") for reader in ("llama", "qwen")]
    rows.append({"step": steps} | {f"validation/{name}": 1.5 for name in names})
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_run(folder: Path, **changes: Any) -> Path:
    """Writes a run that was trained and evaluated; `changes` to its configuration, dots written as "__"."""
    values = base.get_config()
    for name in ("llama", "qwen"):
        values.llms[name] = base.llm(f"folder/{name}")
    changes = {
        "encoder__source": "folder/llama",
        "train__steps": 30,
        "optim__warmup_steps": 3,
        "stages__pretrain__share": 0.5,
    } | changes
    values.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    cfg = config.build(values)
    command = ["run.py", "--config", "my own.py"]
    run_folder.write_workdir(folder, cfg=cfg, base=base.get_config().to_dict(), command=command)
    write_lines(folder / "metrics.jsonl", metrics())
    write_lines(folder / "predictions.jsonl", predictions())
    (folder / "checkpoints" / "30").mkdir(parents=True, exist_ok=True)
    (folder / "eval.json").write_text(json.dumps(evaluation()), encoding="utf-8")
    (folder / "slots.json").write_text(json.dumps([[1.0, 0.25], [0.25, None]]), encoding="utf-8")
    return folder
