"""Pretrained models of a configuration, readers and encoder bodies: files, shapes, shardings, loading."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from lw_jax.core import config, precision, tree
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import FP32, Precision
from lw_jax.core.types import Tree
from lw_jax.hub import architectures, sources, weights
from lw_jax.models import bert, decoder, encoder, quant
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig
from lw_jax.recipes import selfmade
from sharding import placement, rules, shards, tables


def locate(cfg: Config, source: str, sha256: str) -> Path:
    """Returns the path of a model's files; a self-made reader must have been trained before."""
    if source.startswith(sources.SELFMADE):
        return selfmade.finished_folder(cfg, source)
    return sources.locate(source, sha256=sha256)


def cached(cfg: Config, source: str) -> Path | None:
    """Returns the path of a model's files, None where they are not on this machine; fetches nothing."""
    if source.startswith(sources.SELFMADE):
        path = selfmade.folder(cfg, source)
        return path if (path / "config.json").exists() else None
    return sources.cached(source)


def outline(cfg: Config, source: str, *, parts: int = 1) -> DecoderConfig:
    """Returns the shapes of a model, or of one of so many `parts` of it; needs no weights on this machine."""
    is_selfmade = source.startswith(sources.SELFMADE)
    model = selfmade.decoder_config(cfg, source) if is_selfmade else architectures.find(source)
    heads, kv_heads = (size if size % parts else size // parts for size in (model.heads, model.kv_heads))
    sizes = {"ffn": model.ffn // parts, "vocab": model.vocab // parts}
    return dataclasses.replace(model, heads=heads, kv_heads=math.gcd(heads, kv_heads), **sizes)


def precision_of(cfg: Config, llm: config.LLM, platform: str) -> Precision:
    return precision.of_reader(llm.weights, cfg.compute.dtype, platform)


def describe(shapes: DecoderConfig, cfg: Config, llm: config.LLM, platform: str) -> Tree:
    """Returns a frozen reader's tree as shapes, quantised as the configuration says."""
    dtypes = precision_of(cfg, llm, platform)
    return quant.abstract(decoder.abstract(shapes, dtypes.values, factors=dtypes.factors), llm.weights)


def reader_bytes(cfg: Config) -> dict[str, int]:
    """Returns the bytes of every frozen reader's weights on a GPU, from shapes alone."""
    return {name: tree.nbytes(describe(outline(cfg, llm.source), cfg, llm, "gpu")) for name, llm in cfg.llms.items()}


def shardings(shapes: Tree, llm: config.LLM, at: placement.Component, name: str) -> Tree:
    table = tables.reader_table(at.table, packed=llm.weights in quant.PACKED)
    return rules.shardings(table, shapes, at.mesh, name=f"llms/{name}")


def load(location: Path, cfg: Config, llm: config.LLM, shardings: Tree, platform: str) -> Tree:
    dtypes = precision_of(cfg, llm, platform)
    return weights.load(location, dtype=dtypes.values, factors=dtypes.factors, shardings=shardings, packed=llm.weights)


def mode(cfg: Config, mesh: Mesh, own: Precision) -> decoder.Mode:
    """Returns a decoder's mode on a mesh: rematerialisation, rows constrained to the data axis, precision."""
    return decoder.Mode(remat=cfg.compute.remat, constrain=shards.keep_rows(mesh), factors=own.factors)


# --- pretrained bodies of encoders

BODIES = {"lm": weights.describe, "bert": weights.describe_bert}  # encoder.kind -> what reads a body's shapes
Body = DecoderConfig | BertConfig


def abstract_body(body: Body, own: Precision = FP32) -> Tree:
    """Returns a body as shapes: in fp32, as it may be trained, or a frozen decoder as its products take it."""
    if isinstance(body, BertConfig):
        return bert.abstract(body, jnp.float32)
    return encoder.keep_body(decoder.abstract(body, own.values, factors=own.factors))


def load_body(location: Path, body: Body, own: Precision = FP32, sharding: Sharding | None = None) -> Tree:
    """Loads the same; a frozen decoder whole on each device of a sharding."""
    if isinstance(body, BertConfig):
        return weights.load_bert(location, layers=body.layers)
    shardings = None
    if sharding is not None:
        whole = dataclasses.replace(weights.describe(location), layers=body.layers)
        shardings = jax.tree.map(lambda leaf: sharding, decoder.abstract(whole, own.values, factors=own.factors))
    dtypes = {"dtype": own.values, "factors": own.factors}
    return encoder.keep_body(weights.load(location, **dtypes, layers=body.layers, shardings=shardings))


def cut_body(body: Body, spec: config.Encoder) -> Body:
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
    cut = dataclasses.replace(body, layers=spec.layers or body.layers)
    if spec.states > cut.layers:
        raise UserError(f"config.encoder.states={spec.states} but the encoder has {cut.layers} layers; lower it")
    return dataclasses.replace(cut, tied=True) if isinstance(cut, DecoderConfig) else cut
