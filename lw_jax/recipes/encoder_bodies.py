"""Kinds of pretrained encoder bodies: shapes and loading."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import Precision
from lw_jax.core.types import Tree
from lw_jax.hub import weights
from lw_jax.models import bert, decoder, encoder
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig

Body = TypeVar("Body", DecoderConfig, BertConfig)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of body; its parameters are fp32 because they may be trained."""

    describe: Callable[[Path], Any]  # -> DecoderConfig | BertConfig
    abstract: Callable[[Any], Tree]
    load: Callable[[Path, int], Tree]  # (location, layers)


BODIES = {
    "lm": Kind(
        weights.describe,
        lambda cfg: encoder.keep_body(decoder.abstract(cfg, jnp.float32)),
        lambda at, layers: encoder.keep_body(weights.load(at, dtype="float32", layers=layers)),
    ),
    "bert": Kind(
        weights.describe_bert,
        lambda cfg: bert.abstract(cfg, jnp.float32),
        lambda at, layers: weights.load_bert(at, dtype="float32", layers=layers),
    ),
}


def abstract_frozen(body: DecoderConfig, own: Precision) -> Tree:
    """Returns a frozen decoder body as shapes, stored as its products take it."""
    return encoder.keep_body(decoder.abstract(body, own.values, factors=own.factors))


def load_frozen(location: Path, layers: int, own: Precision, sharding: Sharding) -> Tree:
    """Loads the same, whole on each device of a sharding."""
    whole = dataclasses.replace(weights.describe(location), layers=layers)
    shardings = jax.tree.map(lambda leaf: sharding, decoder.abstract(whole, own.values, factors=own.factors))
    return encoder.keep_body(
        weights.load(location, dtype=own.values, factors=own.factors, layers=layers, shardings=shardings)
    )


def cut(body: Body, spec: config.Encoder) -> Body:
    """Returns a body's shapes cut to the configured number of first layers (0: all), without head.

    Raises:
        UserError: it has too few layers, or fewer positions than the window.
    """
    if spec.layers > body.layers:
        raise UserError(
            f"config.encoder.layers={spec.layers} but the body has {body.layers} layers; choose 0 (all) or fewer"
        )
    if spec.window > body.max_positions:
        raise UserError(
            f"config.encoder.window={spec.window} but the body has {body.max_positions} positions; lower it, and raise "
            "encoder.windows for longer texts"
        )
    found = dataclasses.replace(body, layers=spec.layers or body.layers)
    if spec.states > found.layers:
        raise UserError(f"config.encoder.states={spec.states} but the encoder has {found.layers} layers; lower it")
    if not isinstance(found, DecoderConfig):
        return found
    return dataclasses.replace(found, tied=True)
