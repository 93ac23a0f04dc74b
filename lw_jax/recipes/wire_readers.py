"""The frozen readers of a wire: their files, tokenizers, shapes, shardings and weights."""

import functools
from collections.abc import Mapping
from pathlib import Path

from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.data.tokens import Tokenizer, load_tokenizer
from lw_jax.hub import weights
from lw_jax.models import wire
from lw_jax.models.decoder import DecoderConfig
from lw_jax.recipes import frozen_models
from lw_jax.training.recipe import Recipe
from sharding import shards
from sharding.placement import Placement


class WireReaders(Recipe):
    """What recipes of wires have in common: the readers of a configuration on a placement."""

    reader_bytes = staticmethod(frozen_models.reader_bytes)

    def __init__(self, cfg: Config, placed: Placement, *, outline: bool = False):
        """Locates the model files; an `outline` needs none: it has shapes and the loss, but cannot load."""
        self.cfg, self.placement, self.outline = cfg, placed, outline

    @functools.cached_property
    def locations(self) -> dict[str, Path]:
        return {name: frozen_models.locate(self.cfg, llm.source, llm.sha256) for name, llm in self.cfg.llms.items()}

    @functools.cached_property
    def tokenizers(self) -> dict[str, Tokenizer]:
        return {name: load_tokenizer(at) for name, at in self.locations.items()}

    def _describe(self) -> dict[str, DecoderConfig]:
        if self.outline:
            parts = {name: at.parts for name, at in self.placement.readers.items()}
            sources = {name: llm.source for name, llm in self.cfg.llms.items()}
            return {name: frozen_models.outline(self.cfg, sources[name], parts=parts[name]) for name in sources}
        return {name: weights.describe(at) for name, at in self.locations.items()}

    def _abstract_readers(self, found: Mapping[str, wire.Reader]) -> Tree:
        return {
            name: frozen_models.describe(one.config, self.cfg, self.cfg.llms[name], self.placement.platform)
            for name, one in found.items()
        }

    def _reader_shardings(self, shapes: Tree) -> Tree:
        return {
            name: frozen_models.shardings(shapes[name], self.cfg.llms[name], at, name)
            for name, at in self.placement.readers.items()
        }

    def _load_readers(self, shardings: Tree) -> Tree:
        return {
            name: frozen_models.load(at, self.cfg, self.cfg.llms[name], shardings[name], self.placement.platform)
            for name, at in self.locations.items()
        }

    def _make_readers(self, *, kind: str) -> dict[str, wire.Reader]:
        cfg, found = self.cfg, {}
        shapes = self._describe()
        for name, at in self.placement.readers.items():
            stops = () if self.outline else tuple(self.tokenizers[name].stops)
            own = frozen_models.precision_of(cfg, cfg.llms[name], self.placement.platform)
            found[name] = wire.Reader(
                shapes[name],
                cfg.adapter.hidden,
                stops,
                frozen_models.mode(cfg, at.mesh, own),
                unstacked=cfg.eval.layers == "unstacked",
                kind=kind,
                constrain=shards.keep_heads(at.mesh, heads=shapes[name].kv_heads, split=at.table == "tensor"),
            )
        return found
