"""Reuse of a trained run's encoder for new readers: frozen, so that its messages stay readable."""

from pathlib import Path

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.training import checkpoint, run_folder

OWN = ("run", "rate", "ratio")  # encoder keys that may differ: neither its weights nor its input depends on them


def read_config(cfg: Config) -> Config:
    """Returns the configuration of the run that config.encoder.run names.

    Raises:
        UserError: no such run, or its encoder differs from the configured one.
    """
    other = run_folder.read_config(Path(cfg.encoder.run))
    for key, value in config.to_dict(other)["encoder"].items():
        own = getattr(cfg.encoder, key)
        if key not in OWN and value != own:
            raise UserError(
                f"config.encoder.{key} = {own!r}, but the encoder of encoder.run = {cfg.encoder.run!r} has {value!r}: "
                "new readers need the encoder unchanged; use the same value"
            )
    return other


def read_trainable(cfg: Config, shapes: Tree) -> Tree:
    """Returns that run's trainable tree from its best checkpoint (the latest where none was validated)."""
    try:
        return checkpoint.read_best(Path(cfg.encoder.run), shapes, identity=None).state["trainable"]
    except UserError as error:
        raise UserError(f"config.encoder.run = {cfg.encoder.run!r}: {error}") from error
