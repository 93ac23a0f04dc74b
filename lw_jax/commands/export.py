"""The verb `export`: what a run has learned, as a PEFT adapter folder, merged into a model, or as a model's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from lw_jax import recipes
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.hub import peft, weights
from lw_jax.inference import language_model
from lw_jax.models import lora
from lw_jax.recipes.dpo import DPO
from lw_jax.training.run_folder import check_writable
from sharding import placement

FLAGS = {"dpo": ("peft", "merged"), "ttt": ("model",)}  # of each recipe


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path, folders: Mapping[str, Path]) -> int:
    """Writes what the best checkpoint holds (the latest where none was validated) to the folders named by flag."""
    del resolved
    known = FLAGS.get(cfg.recipe, ())
    if strange := sorted(folders.keys() - set(known)):
        told = f"takes {' and '.join(f'--{flag}' for flag in known)}" if known else "has nothing to export"
        raise UserError(f"{workdir}: --{strange[0]}: a run of recipe {cfg.recipe!r} {told}")
    for flag, folder in folders.items():
        check_writable(folder, remedy=f"choose another folder for --{flag}")
    if cfg.recipe == "ttt":
        lm = language_model.load_trained(cfg, workdir)
        lm.save(folders["model"])
        print(f"step {lm.step}: model and tokenizer, fp32, in {folders['model']}")
        return 0
    return _export_pairs(cfg, workdir, folders)


def _export_pairs(cfg: Config, workdir: Path, folders: Mapping[str, Path]) -> int:
    recipe = DPO(cfg, placement.place("single", recipes.reader_bytes(cfg)))
    restored = recipes.read_best(recipe, cfg, workdir)
    pairs, model_type = restored.state["trainable"], weights.model_type(recipe.location)
    if "peft" in folders:
        peft.save(folders["peft"], pairs, recipe.lora, model_type=model_type, base=recipe.llm.source)
        print(f"step {restored.step}: adapter for {recipe.llm.source} in {folders['peft']}")
    if "merged" in folders:
        save_merged(folders["merged"], recipe, pairs, model_type)
        print(f"step {restored.step}: whole model, bf16, in {folders['merged']}")
    return 0


def save_merged(folder: Path, recipe: DPO, pairs: Any, model_type: str) -> None:
    """Writes the model with its pairs added in, bf16; packed matrices of an AWQ folder become floats first."""
    packed = "awq" if recipe.llm.weights == "awq" else ""
    params = weights.load(recipe.location, dtype=jnp.bfloat16, packed=packed)
    params = lora.merge(lora.unpack(params, recipe.model, jnp.bfloat16), pairs, recipe.lora)
    weights.save(folder, params, recipe.model, model_type=model_type, tokenizer=recipe.tokenizer.backend)
