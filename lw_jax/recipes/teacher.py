"""A teacher's likeliest tokens: computed once, then read from a cache on disk."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import precision
from lw_jax.core.compiling import jitted
from lw_jax.core.types import Tree
from lw_jax.data.batches import Batch, Encoded
from lw_jax.data.frozen_cache import CachedRows, Store, key_of
from lw_jax.hub import sources, weights
from lw_jax.models import wire
from lw_jax.recipes.wire_readers import WireReaders
from sharding import place


class Teacher:
    """Computes every reader's teacher tokens once the readers are loaded, and serves them to data sets."""

    def __init__(self, recipe: WireReaders):
        self.recipe = recipe
        self._waiting: list[tuple[Encoded, dict[str, CachedRows]]] = []

    @functools.cached_property
    def stores(self) -> dict[str, Store]:
        """Returns each reader's cache, opened when a data set asks: who reads a trained wire needs no teacher."""
        recipe, cfg, stores = self.recipe, self.recipe.cfg, {}
        for name, tokenizer in recipe.tokenizers.items():
            meaning = {
                "prompt": dataclasses.asdict(cfg.prompt),
                "arithmetic": list(precision.of(cfg.compute.dtype, recipe.placement.platform)),
                "weights": weights.identify(recipe.locations[name]),
                "stored": cfg.llms[name].weights,
                "tokenizer": tokenizer.fingerprint,
                "template": cfg.llms[name].template,
            }
            shape = cfg.data.answer_tokens, self._count(name)
            rows = {"ids": (shape, np.int32), "logp": (shape, np.float16)}
            stores[name] = Store(sources.cache_root() / "teacher", meaning, rows=rows)
        return stores

    def _count(self, name: str) -> int:
        return min(self.recipe.cfg.loss.teacher_k, self.recipe.wire.readers[name].config.vocab)

    def attach(self, encoded: Encoded) -> Encoded:
        """Returns the data set with teacher tokens in place of its text prompts, available behind `fill`."""
        readers, teachers = {}, {}
        for name, fields in encoded.readers.items():
            given = zip(fields["text"].ids, fields["answer"].ids, strict=True)
            keys = [key_of(text, answer) for text, answer in given]
            readers[name] = {key: field for key, field in fields.items() if key != "text"}
            teachers[name] = CachedRows(self.stores[name], keys, fields["answer"].width)
        self._waiting.append((encoded, teachers))
        return dataclasses.replace(encoded, readers=readers, teachers=teachers)

    def fill(self, readers: Tree) -> None:
        """Computes what the caches lack of the data sets that were attached."""
        size = place.round_up(self.recipe.cfg.eval.batch, self.recipe.placement.data)
        for encoded, teachers in self._waiting:
            for name, rows in teachers.items():
                read = functools.partial(self._read, readers[name], name, encoded)
                count = rows.store.fill(rows.keys, read, batch=size, what=f"{name}'s answers from the text itself")
                if count:
                    print(f"teacher {name}: {count:,} examples computed; cached in {rows.store.folder}", flush=True)
        self._waiting.clear()

    def _read(self, params: Tree, name: str, encoded: Encoded, positions: list[int]) -> Batch:
        """Returns the rows of some examples, padded to the store's length."""
        fields = place.put_eval(encoded.collate(positions)["readers"][name], self.recipe.placement.readers[name].mesh)
        ids, logp = jax.device_get(self._likeliest(params, fields, name))
        missing = ((0, 0), (0, self.recipe.cfg.data.answer_tokens - ids.shape[1]), (0, 0))
        return {"ids": np.pad(ids, missing), "logp": np.pad(logp, missing)}

    @jitted("name")
    def _likeliest(self, params: Tree, fields: Mapping, name: str) -> tuple[jax.Array, jax.Array]:
        """Returns ids i32 and log-probabilities f32 [b t k] of a reader's likeliest tokens."""
        text = wire.text_prompt(params, fields["text"])
        logits = self.recipe.wire.answer_logits(params, name, text, fields)
        values, ids = jax.lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32), axis=2), self._count(name))
        return ids, values
