"""A trained run's encoder for readers that it never saw: taken as it is, frozen, so that its messages stay readable."""

from pathlib import Path

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.training import checkpoint, run_folder

OWN = ("run", "rate")  # of the encoder's keys, those that say nothing about its weights or what it reads


def read_config(cfg: Config) -> Config:
    """Returns the configuration of the run that config.encoder.run names.

    Raises:
        UserError: there is no such run, or its encoder differs from the configured one.
    """
    other = run_folder.read_config(Path(cfg.encoder.run))
    for key, value in config.to_dict(other)["encoder"].items():
        mine = getattr(cfg.encoder, key)
        if key not in OWN and value != mine:
            raise UserError(
                f"config.encoder.{key} = {mine!r}, but the encoder of encoder.run = {cfg.encoder.run!r} has {value!r}: "
                "a reader joins a wire as it is; take the same value"
            )
    return other


def read_trainable(cfg: Config, shapes: Tree) -> Tree:
    """Returns what that run has trained, from its best checkpoint (the latest where none was validated)."""
    try:
        return checkpoint.read_best(Path(cfg.encoder.run), shapes, identity=None).state["trainable"]
    except UserError as error:
        raise UserError(f"config.encoder.run = {cfg.encoder.run!r}: {error}") from error
