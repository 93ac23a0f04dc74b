"""Frozen models as a configuration names them: where their files lie, their shapes, placement and loading."""

from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from lw_jax.core import config, tree
from lw_jax.core.config import Config
from lw_jax.core.types import Tree, reader_dtype
from lw_jax.hub import architectures, sources, weights
from lw_jax.models import decoder, quant
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.pass_costs import Pass
from lw_jax.recipes import selfmade
from sharding import placement, rules, shards, tables


def locate(cfg: Config, source: str, sha256: str) -> Path:
    """Returns where a model's files lie; a self-made reader's folder must have been written before."""
    if source.startswith(selfmade.PREFIX):
        return selfmade.finished_folder(cfg, source)
    return sources.locate(source, sha256=sha256)


def cached(cfg: Config, source: str) -> Path | None:
    """Returns where a model's files lie if they are on this machine; fetches and makes nothing."""
    if source.startswith(selfmade.PREFIX):
        path = selfmade.folder(cfg, source)
        return path if (path / "config.json").exists() else None
    return sources.cached(source)


def outline(cfg: Config, source: str) -> DecoderConfig:
    """Returns a model's shapes, without its weights where they are not on this machine."""
    if source.startswith(selfmade.PREFIX):
        return selfmade.decoder_config(cfg, source)
    return architectures.find(source)


def describe(shapes: DecoderConfig, cfg: Config, llm: config.LLM) -> Tree:
    """Returns a frozen reader's tree as shapes, its matrices packed where the configuration says so."""
    return quant.abstract(decoder.abstract(shapes, reader_dtype(llm.weights, cfg.compute.dtype)), llm.weights)


def reader_bytes(cfg: Config) -> dict[str, int]:
    """Returns the bytes of every frozen reader's weights, from its shapes alone."""
    return {name: tree.nbytes(describe(outline(cfg, llm.source), cfg, llm)) for name, llm in cfg.llms.items()}


def shardings(shapes: Tree, llm: config.LLM, at: placement.Component, name: str) -> Tree:
    """Returns where a frozen reader's leaves lie."""
    table = tables.reader_table(at.table, packed=llm.weights in quant.PACKED)
    return rules.shardings(table, shapes, at.mesh, name=f"llms/{name}")


def load(location: Path, cfg: Config, llm: config.LLM, shardings: Tree) -> Tree:
    """Streams a frozen reader's weights into their shards."""
    dtype = reader_dtype(llm.weights, cfg.compute.dtype)
    return weights.load(location, dtype=dtype, shardings=shardings, packed=llm.weights)


def mode(cfg: Config, mesh: Mesh) -> decoder.Mode:
    """Returns how a decoder runs on a mesh: what it keeps for its backward pass, and its rows over the data axis."""
    return decoder.Mode(remat=cfg.compute.remat, constrain=shards.keep_rows(mesh))


def teacher_forced(
    cfg: Config, *, llm: config.LLM, at: placement.Component, rows: int, positions: int, answers: int
) -> Pass:
    """Returns one pass of a frozen reader where it lies, for the arithmetic of `recipes.terms`."""
    return Pass(
        rows=rows,
        positions=positions,
        answers=answers,
        remat=cfg.compute.remat,
        size=jnp.dtype(reader_dtype(llm.weights, cfg.compute.dtype)).itemsize,
        model=at.mesh.shape["model"] if at.table == "tensor" else 1,
        data=at.mesh.shape["data"] if at.table == "fsdp" else 1,
    )
