"""The verb `eval`: the control table of a trained wire, as a table, eval.json and predictions.jsonl."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from lw_jax.api import TrainedWire, open_wire
from lw_jax.core.config import Config
from lw_jax.evals import rows
from lw_jax.recipes.latentwire import LatentWire
from sharding import place


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path) -> int:
    """Measures `eval.examples` validation examples from the best checkpoint (the latest where none was validated)."""
    del resolved
    wire = open_wire(cfg, workdir)
    records = measure(wire)
    table = rows.summarise(records)
    if jax.process_index() == 0:
        result = {"step": wire.step, "rows": table}
        (workdir / "eval.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (workdir / "predictions.jsonl").write_text("".join(lines), encoding="utf-8")
        print(rows.table(table))
        print(f"checkpoint {wire.step}; {workdir / 'eval.json'}, {workdir / 'predictions.jsonl'}")
    return 0


def predict(recipe: LatentWire) -> rows.Predict:
    """Returns the recipe's functions that the control table is made with."""
    return rows.Predict(
        recipe.encode, recipe.prompt_from_latents, recipe.prompt_from_text, recipe.score, recipe.generate
    )


def measure(wire: TrainedWire) -> list[rows.Record]:
    """Returns one record per example, reader and row."""
    recipe, cfg = wire.recipe, wire.recipe.cfg
    encoded = recipe.data("validation", rows=cfg.eval.rows)
    for line in encoded.describe():
        print(line, flush=True)
    return list(
        rows.measure(
            predict(recipe),
            (wire.trainable, wire.frozen),
            encoded,
            asked=dataclasses.replace(cfg.eval, batch=place.round_up(cfg.eval.batch, recipe.placement.data)),
            decode={name: tokenizer.decode for name, tokenizer in recipe.tokenizers.items()},
            place=lambda batch, name: place.put_eval(batch, recipe.mesh_of(name)),
        )
    )
