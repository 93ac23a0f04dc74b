"""Reuse of a trained run's encoder for new readers: frozen, so that its messages stay readable."""

from collections.abc import Collection, Mapping

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.hub import wire_repository
from lw_jax.recipes import wire_models
from lw_jax.training import checkpoint, run_folder, wire_folder, wire_tensors
from lw_jax.training.wire_folder import BODY

OWN = ("run", "rate", "ratio")  # encoder keys that may differ: neither its weights nor its input depends on them
NAMED = ("source", "sha256")  # a wire folder knows its body by hashes


def is_exported(cfg: Config) -> bool:
    return wire_folder.is_wire(wire_repository.locate(cfg.encoder.run))


def read_config(cfg: Config) -> Config:
    """Returns the configuration of the run that config.encoder.run names.

    Raises:
        UserError: no such run, or its encoder differs from the configured one.
    """
    folder = wire_repository.locate(cfg.encoder.run)
    other = run_folder.read_config(folder)
    free = (*OWN, *NAMED) if wire_folder.is_wire(folder) else OWN
    for key, value in config.to_dict(other)["encoder"].items():
        configured = getattr(cfg.encoder, key)
        if key not in free and value != configured:
            raise UserError(
                f"config.encoder.{key} = {configured!r}, but the encoder of encoder.run = {cfg.encoder.run!r} has "
                f"{value!r}: new readers need the encoder unchanged; use the same value"
            )
    return other


def read_trainable(cfg: Config, shapes: Tree, *, without: Collection[str] = ()) -> Tree:
    """Returns that run's trainable tree from its best checkpoint (the latest where none was validated).

    Of a wire folder the readers `without` may be left out of `shapes`.
    """
    folder = wire_repository.locate(cfg.encoder.run)
    try:
        if wire_folder.is_wire(folder):
            body = {name: model for name, model in wire_folder.read(folder).models.items() if name == BODY}
            wire_models.check(folder, body, cfg, wire_models.describe(cfg, names={BODY}))
            return wire_tensors.read(folder, shapes, without=without)
        restored = checkpoint.read_best(folder, shapes, identity=None)
        _check_body(cfg, restored.identity)
        return restored.state["trainable"]
    except UserError as error:
        raise UserError(f"config.encoder.run = {cfg.encoder.run!r}: {error}") from error


def _check_body(cfg: Config, saved: Mapping[str, str]) -> None:
    """Refuses a pretrained body or its tokenizer other than those of a run's checkpoint, by its identity.

    A trained body that is itself of another run is not compared.
    """
    model = wire_models.describe(cfg, names={BODY}).get(BODY)
    if model is None:
        return
    body, tokenizer = saved["encoder"], saved.get("tokenizers/encoder")
    if tokenizer != model.tokenizer:
        what, pair = "tokenizer", (tokenizer, model.tokenizer)
    elif not body.endswith(model.fingerprint) and (cfg.encoder.rank or "of the run" not in body):
        what, pair = "pretrained body", (body.rpartition(" ")[2], model.fingerprint)
    else:
        return
    raise UserError(
        f"its encoder has a {what} of fingerprint {pair[0]}, and config.encoder.source = {cfg.encoder.source!r} has "
        f"{pair[1]}: the same text would become another message; name that one"
    )
