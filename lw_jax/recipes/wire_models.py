"""Pretrained models that a wire belongs to, by the hashes of their weights and what their tokenizers do."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.data import tokens
from lw_jax.hub import sources, weights
from lw_jax.recipes import frozen_models
from lw_jax.training.wire_folder import BODY, READERS, Model, flag, label, source_of


def describe(cfg: Config, *, names: Collection[str] | None = None) -> dict[str, Model]:
    """Returns the readers and the encoder's pretrained body, as `WireFolder.models`; of these names alone."""
    wanted: dict[str, tuple[str, Callable[[Path], Any]]]
    wanted = {f"{READERS}{name}": (llm.sha256, weights.describe) for name, llm in cfg.llms.items()}
    if cfg.encoder.kind in frozen_models.BODIES:
        wanted[BODY] = cfg.encoder.sha256, frozen_models.BODIES[cfg.encoder.kind]
    models = {}
    for name, (sha256, read) in wanted.items():
        if names is None or name in names:
            source = source_of(cfg, name)
            location = frozen_models.locate(cfg, source, sha256)
            if name == BODY:
                tokenizer = tokens.identify(tokens.load_source_tokenizer(location))
            else:
                template = cfg.llms[name.removeprefix(READERS)].template
                tokenizer = tokens.identify(tokens.load_tokenizer(location), template=template)
            models[name] = Model(
                source=source,
                local=sources.is_local(source),
                fingerprint=weights.fingerprint(location, describe=read),
                sha256=weights.hash_files(location),
                tokenizer=tokenizer,
            )
    return models


def check(folder: Path, stated: Mapping[str, Model], cfg: Config, present: Mapping[str, Model]) -> None:
    """Refuses models other than those that a wire folder states.

    Raises:
      UserError: names the model, both hashes and the flag that names another.
    """
    for name in sorted(stated.keys() | present.keys()):
        if name not in stated or name not in present:
            kind = "does not state" if name in present else "states, but its configuration does not have,"
            raise UserError(f"{folder}: config.json {kind} models.{name}: copy the folder anew")
        theirs, ours = stated[name], present[name]
        if sorted(theirs.sha256.values()) != sorted(ours.sha256.values()):
            what, pair = "weights of sha256", (_short(theirs), _short(ours))
        elif theirs.fingerprint != ours.fingerprint:
            what, pair = "a configuration and weights of fingerprint", (theirs.fingerprint, ours.fingerprint)
        elif theirs.tokenizer != ours.tokenizer:
            what, pair = "a tokenizer of fingerprint", (theirs.tokenizer, ours.tokenizer)
        else:
            continue
        raise UserError(
            f"{folder}: {label(name)} is {theirs.source!r} with {what} {pair[0]}, and {source_of(cfg, name)!r} has "
            f"{pair[1]}: another model cannot read this wire; name that one: {flag(name)}SOURCE"
        )


def _short(model: Model) -> str:
    return ", ".join(f"{value[:16]}..." for value in sorted(model.sha256.values())[:3])
