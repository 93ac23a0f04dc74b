"""What the field has, as named configurations of one bench: same data, readers, steps and batch, one table.

    python examples/methods.py --config configs/pairs.py --out runs/methods
    python examples/methods.py --config configs/squad.py --out runs/methods --rows ours,ICAE-like \
        --config.data.train=FILE --config.data.validation=OTHER --config.train.steps=500

A row takes from a method what decides a message: encoder, pooling, kind of prefix, what is trained. It is no
reproduction. The run "ours" also gives the rows without a wire: selection, truncation, the text itself, and its keys
and values in the message's positions. Folders, resuming and flags are those of examples/ablate.py.
"""

import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import row_runs
from examples.ablate import BERT, BYTES
from lw_jax.core import environment
from lw_jax.core.errors import leave
from lw_jax.training import run_folder

LEARNED = ("encoder.pooling=queries", "adapter.start=random")  # slots begin as random queries
ROWS = {
    "original": (*BYTES, "encoder.pooling=queries", "encoder.slots=32", "encoder.width=256"),
    "xRAG-like": (*BERT, "encoder.rate=0.0", "encoder.slots=1", "stages.answer.slots="),
    "ICAE-like": (*LEARNED, "encoder.rank=8", "encoder.rate=1.0"),
    "500x-like": (*LEARNED, "encoder.rank=8", "encoder.rate=1.0", "adapter.kind=kv"),
    "ARC-like": ("encoder.pooling=windows", "adapter.start=random", "encoder.rate=0.0"),
    "cache code": (  # nothing is trained, whatever train.steps the others take
        *("encoder.kind=cache", "encoder.ratio=2", "encoder.width=256", "encoder.texts=400"),
        *("message.bytes=64", "train.steps=0"),
    ),
    "ours": (
        "adapter.kind=kv",
        "adapter.start=aligned",
        "eval.rows=text,text_taught,latents,shuffled,none,truncated,selected_taught,ceiling_taught",
    ),
}
# Rows of an evaluation that the table names after their method.
ALONE = {
    "selected_taught": "selection",
    "truncated": "truncation",
    "ceiling_taught": "attention matching",
    "text_taught": "text",
    "none": "nothing",
}
FIGURES = ("positions", "f1", "nll", "normalised_f1", "seconds_per_step", "trainable_mb")


def main(argv: list[str]) -> int:
    flags = ("eval.rows=text,text_taught,latents,shuffled,none",)
    return row_runs.main(row_runs.Bench(__doc__ or "", ROWS, FIGURES, _read, first="method", flags=flags), argv)


def _read(folder: Path, row: str, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields each reader's message, and of the run that has them the rows without a wire."""
    log = folder / "metrics.jsonl"  # of a run with steps
    steps = run_folder.read_metrics(log) if log.exists() else []
    laps = [one["train/seconds_per_step"] for one in steps if "train/seconds_per_step" in one]
    cost = {"seconds_per_step": statistics.median(laps) if laps else None, "trainable_mb": _trained(folder) / 1e6}
    free = dict.fromkeys(cost)
    for reader, rows in result["rows"].items():
        between = result["readers"][reader]
        alone = ALONE if "selected_taught" in rows else {}  # of the run that has the rows without a wire
        for name, method in (("latents", row), *((name, alone[name]) for name in alone if name in rows)):
            share = _share(rows, name, between["upper"]) if between.get("normalised_f1") is not None else None
            line = {"method": method, "reader": reader, "normalised_f1": share}
            line |= {key: rows[name][key] for key in ("positions", "f1", "nll")}
            yield line | (cost if name == "latents" else free)


def _share(rows: Mapping[str, Mapping[str, float]], name: str, upper: str) -> float:
    return (rows[name]["f1"] - rows["none"]["f1"]) / (rows[upper]["f1"] - rows["none"]["f1"])


def _trained(folder: Path) -> int:
    """Returns the bytes of the parameters that a run trains, in fp32."""
    cfg, total = run_folder.read_config(folder), 0
    if not cfg.train.steps:
        return 0
    environment.hide_idle_cuda()  # before anything imports JAX
    from lw_jax import recipes
    from lw_jax.core.tree import flatten_paths

    recipe = recipes.outline(cfg)
    for path, leaf in flatten_paths(recipe.abstract.trainable).items():
        rate = next(rate for pattern, rate in recipe.rates if re.fullmatch(pattern, path))
        if any(rate) if isinstance(rate, tuple) else rate:
            total += 4 * math.prod(leaf.shape)
    return total


if __name__ == "__main__":
    leave(lambda: main(sys.argv[1:]))
