"""Recipes by the name that `config.recipe` gives them."""

from jax.sharding import Mesh

from lw_jax.core.config import Config
from lw_jax.recipes.base import Recipe
from lw_jax.recipes.latentwire import LatentWire

RECIPES = {"latentwire": LatentWire}


def make(cfg: Config, mesh: Mesh) -> Recipe:
    """Returns the recipe that the configuration names."""
    return RECIPES[cfg.recipe](cfg, mesh)
