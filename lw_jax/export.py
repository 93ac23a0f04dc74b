"""The verb `export`: what preference tuning has learned, as a PEFT adapter folder or merged into a whole model."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lw_jax import checkpoint, peft, recipes, weights
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.models import lora
from lw_jax.recipes.dpo import DPO
from sharding import mesh as meshes
from sharding import place, placement


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path, peft_folder: str, merged: str) -> int:
    """Writes the best checkpoint's pairs (the latest's where none was validated) as the flags ask."""
    del resolved
    if cfg.recipe != "dpo":
        raise UserError(f"{workdir}: a run of recipe {cfg.recipe!r} has no LoRA pairs; export is for recipe 'dpo'")
    placed = placement.together(meshes.make(data=1, model=1, devices=jax.devices()[:1]), list(cfg.llms))
    recipe = DPO(cfg, placed)
    wanted = place.place_shapes(recipe.abstract().trainable, recipe.shardings().trainable)
    identity = recipes.identity(recipe, cfg)
    restored = checkpoint.read_best(workdir, wanted, identity=identity)
    pairs, model_type = restored.state["trainable"], weights.model_type(recipe.location)
    if peft_folder:
        peft.save(Path(peft_folder), pairs, recipe.lora, model_type=model_type, base=recipe.llm.source)
        print(f"step {restored.step}: adapter for {recipe.llm.source} in {peft_folder}")
    if merged:
        save_merged(Path(merged), recipe, pairs, model_type)
        print(f"step {restored.step}: whole model, bf16, in {merged}")
    return 0


def save_merged(folder: Path, recipe: DPO, pairs: Any, model_type: str) -> None:
    """Writes the model with its pairs added in, bf16; packed matrices of an AWQ folder become floats first."""
    packed = "awq" if recipe.llm.weights == "awq" else ""
    params = weights.load(recipe.location, dtype=jnp.bfloat16, packed=packed)
    params = lora.merge(lora.unpack(params, recipe.model, jnp.bfloat16), pairs, recipe.lora)
    weights.save(folder, params, recipe.model, model_type=model_type, tokenizer=recipe.tokenizer.backend)
