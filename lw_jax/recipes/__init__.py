"""Recipes by the name that `config.recipe` gives them."""

from pathlib import Path

import jax

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.recipes import wire_models
from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.recipes.dpo import DPO
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.recipes.ttt import TTT
from lw_jax.training import checkpoint, wire_folder, wire_tensors
from lw_jax.training.checkpoint import Restored
from lw_jax.training.recipe import Recipe
from sharding import placement as placements
from sharding.placement import Placement

RECIPES = {"latentwire": LatentWire, "dpo": DPO, "ttt": TTT}


def kind_of(cfg: Config) -> type[LatentWire | CacheWire | DPO | TTT]:
    """Returns the class of the configured recipe; a wire's goes by its kind of message."""
    return CacheWire if cfg.encoder.kind == "cache" else RECIPES[cfg.recipe]


def make(cfg: Config, placement: Placement, *, outline: bool = False) -> Recipe:
    """Returns the configured recipe; an outline needs no file and can only be planned.

    Raises:
      UserError: the configuration has no step to take, plan or time.
    """
    if not cfg.train.steps:
        raise UserError(
            "config.train.steps = 0: nothing is trained, so there is no step to time; `plan` says what the start takes"
        )
    return kind_of(cfg)(cfg, placement, outline=outline)


def outline(cfg: Config) -> Recipe:
    """Returns the recipe on one device of this process, without files."""
    placed = placements.place("single", reader_bytes(cfg), devices=jax.local_devices()[:1])
    return make(cfg, placed, outline=True)


def reader_bytes(cfg: Config) -> dict[str, int]:
    """Returns the bytes of every frozen reader's weights, from shapes alone."""
    return RECIPES[cfg.recipe].reader_bytes(cfg)


def identity(recipe: Recipe, cfg: Config) -> dict[str, str]:
    """Returns the identity that resuming a checkpoint requires: that of `readable` and the data's content."""
    return readable(recipe, cfg) | recipe.content()


def readable(recipe: Recipe, cfg: Config) -> dict[str, str]:
    """Returns the identity that reading a checkpoint requires: weights and configuration, no data."""
    return recipe.identity() | {"config": config.identity(cfg)}


def read_best(recipe: Recipe, cfg: Config, workdir: Path) -> Restored:
    """Returns a run's best checkpoint on the recipe's placement; see `checkpoint.read_best`.

    Of a wire folder it returns the wire for the readers of `cfg`, once they are those that it belongs to.
    """
    shapes = recipe.placed().trainable
    if wire_folder.is_wire(workdir):
        wire = wire_folder.read(workdir)
        absent = wire.configuration["llms"].keys() - cfg.llms.keys()
        models = {key: info for key, info in wire.models.items() if key.removeprefix(wire_folder.READERS) not in absent}
        wire_models.check(workdir, models, cfg, wire_models.describe(cfg))
        trainable = wire_tensors.read(workdir, shapes, without=absent)
        return Restored(wire.step, {"trainable": trainable}, data={})
    return checkpoint.read_best(workdir, shapes, identity=readable(recipe, cfg))
