"""Export of trained weights: PEFT adapter, merged model, TTT model folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp

from lw_jax import recipes
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.hub import peft, weights
from lw_jax.inference import language_model
from lw_jax.models import lora
from lw_jax.recipes.dpo import DPO
from lw_jax.training.run_folder import check_writable
from sharding import placement

FLAGS = {"dpo": ("peft", "merged"), "ttt": ("model",)}  # by recipe


def export(cfg: Config, workdir: Path, folders: Mapping[str, Path]) -> Iterator[str]:
    """Writes a run's best checkpoint (the latest where none was validated) to folders by flag.

    Yields a line for each folder.

    Raises:
        UserError: a flag that the recipe does not have, a folder that is not writable, or no checkpoint yet.
    """
    known = FLAGS.get(cfg.recipe, ())
    if unknown := sorted(folders.keys() - set(known)):
        rule = f"takes {' and '.join(f'--{flag}' for flag in known)}" if known else "has nothing to export"
        raise UserError(f"{workdir}: --{unknown[0]}: a run of recipe {cfg.recipe!r} {rule}")
    for flag, folder in folders.items():
        check_writable(folder, remedy=f"choose another folder for --{flag}")
    if cfg.recipe == "ttt":
        lm = language_model.load_trained(cfg, workdir)
        lm.save(folders["model"])
        yield f"step {lm.step}: model and tokenizer, fp32, in {folders['model']}"
        return
    recipe = DPO(cfg, placement.place("single", recipes.reader_bytes(cfg)))
    restored = recipes.read_best(recipe, cfg, workdir)
    pairs, model_type = restored.state["trainable"], weights.model_type(recipe.location)
    if "peft" in folders:
        peft.save(folders["peft"], pairs, recipe.lora, model_type=model_type, base=recipe.llm.source)
        yield f"step {restored.step}: adapter for {recipe.llm.source} in {folders['peft']}"
    if "merged" in folders:
        save_merged(folders["merged"], recipe, pairs, model_type)
        yield f"step {restored.step}: whole model, bf16, in {folders['merged']}"


def save_merged(folder: Path, recipe: DPO, pairs: Tree, model_type: str) -> None:
    """Writes the model with its LoRA pairs merged in, bf16; AWQ matrices are unpacked first."""
    packed = "awq" if recipe.llm.weights == "awq" else ""
    params = weights.load(recipe.location, dtype=jnp.bfloat16, packed=packed)
    params = lora.merge(lora.unpack(params, recipe.model, jnp.bfloat16), pairs, recipe.lora)
    weights.save(folder, params, recipe.model, model_type=model_type, tokenizer=recipe.tokenizer.backend)
