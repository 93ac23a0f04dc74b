"""Recipes by the name that `config.recipe` gives them."""

from jax.sharding import Mesh

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.recipes.base import Recipe
from lw_jax.recipes.latentwire import LatentWire

RECIPES = {"latentwire": LatentWire}


def make(cfg: Config, mesh: Mesh) -> Recipe:
    """Returns the recipe that the configuration names."""
    return RECIPES[cfg.recipe](cfg, mesh)


def identity(recipe: Recipe, cfg: Config) -> dict[str, str]:
    """Returns what a checkpoint must agree with: the recipe's own fingerprints and the meaning of the configuration."""
    return recipe.identity() | {"config": config.digest(config.meaning(cfg))}
