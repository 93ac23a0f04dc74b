"""On-disk caches of what frozen models give examples: a teacher's likeliest tokens, a reference's log-probabilities."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import precision
from lw_jax.core.compiling import jitted
from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.data.batches import Batch, Encoded
from lw_jax.data.frozen_cache import CachedRows, Store, key_of
from lw_jax.data.preferences import Pair, Preferences
from lw_jax.hub import sources
from lw_jax.models import wire
from sharding import place
from sharding.placement import Placement


class Teacher:
    """Computes every reader's teacher tokens once the readers are loaded, and serves them to data sets."""

    def __init__(self, cfg: Config, wired: wire.Wire, placement: Placement, identities: Mapping[str, dict]):
        """Prepares the caches; `identities` has each reader's fingerprints of weights, tokenizer and template.

        They are opened when a data set asks: who reads a trained wire needs no teacher.
        """
        self.cfg, self.wire, self.placement = cfg, wired, placement
        self._meaning = {
            "prompt": dataclasses.asdict(cfg.prompt),
            "arithmetic": list(precision.of(cfg.compute.dtype, placement.platform)),
        }
        self._identities = identities
        self._waiting: list[Encoded] = []
        self._readers: Tree | None = None

    @functools.cached_property
    def stores(self) -> dict[str, Store]:
        stores = {}
        for name in self.wire.readers:
            shape = self.cfg.data.answer_tokens, self._count(name)
            rows = {"ids": (shape, np.int32), "logp": (shape, np.float16)}
            stores[name] = Store(sources.cache_root() / "teacher", self._meaning | self._identities[name], rows=rows)
        return stores

    def _count(self, name: str) -> int:
        return min(self.cfg.loss.teacher_k, self.wire.readers[name].config.vocab)

    def attach(self, encoded: Encoded) -> Encoded:
        """Returns the data set with teacher tokens in place of its text prompts, available once readers are loaded."""
        self._waiting.append(encoded)
        self._fill()
        readers = {
            name: {key: field for key, field in fields.items() if key != "text"}
            for name, fields in encoded.readers.items()
        }
        teachers = {
            name: CachedRows(self.stores[name], keys_of(encoded, name), encoded.readers[name]["answer"].width)
            for name in self.wire.readers
        }
        return dataclasses.replace(encoded, readers=readers, teachers=teachers)

    def begin(self, readers: Tree) -> None:
        self._readers = readers
        self._fill()

    def _fill(self) -> None:
        if self._readers is None:
            return
        waiting, self._waiting = self._waiting, []
        for encoded in waiting:
            for name in self.wire.readers:
                store, size = self.stores[name], place.round_up(self.cfg.eval.batch, self.placement.data)
                read, what = functools.partial(self._read, name, encoded), f"{name}'s answers from the text itself"
                count = store.fill(keys_of(encoded, name), read, batch=size, what=what)
                if count:
                    print(f"teacher {name}: {count:,} examples computed; cached in {store.folder}", flush=True)

    def _read(self, name: str, encoded: Encoded, positions: list[int]) -> Batch:
        """Returns the rows of some examples, padded to the store's length."""
        fields = place.put_eval(encoded.collate(positions)["readers"][name], self.placement.readers[name].mesh)
        assert self._readers is not None
        ids, logp = jax.device_get(self._likeliest(self._readers[name], fields, name))
        missing = ((0, 0), (0, self.cfg.data.answer_tokens - ids.shape[1]), (0, 0))
        return {"ids": np.pad(ids, missing), "logp": np.pad(logp, missing)}

    @jitted("name")
    def _likeliest(self, params: Tree, fields: Mapping, name: str) -> tuple[jax.Array, jax.Array]:
        """Returns ids i32 and log-probabilities f32 [b t k] of a reader's likeliest tokens."""
        text = wire.text_prompt(params, fields["text"])
        logits = self.wire.answer_logits(params, name, text, fields)
        values, ids = jax.lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32), axis=2), self._count(name))
        return ids, values


def keys_of(encoded: Encoded, name: str) -> list[bytes]:
    """Returns, for each example, the digest of the reader's input: text prompt and answer tokens."""
    fields = encoded.readers[name]
    return [key_of(text, answer) for text, answer in zip(fields["text"].ids, fields["answer"].ids, strict=True)]


class Reference:
    """Computes the log-probabilities of missing pairs and serves them to data sets."""

    def __init__(
        self,
        cfg: Config,
        placement: Placement,
        name: str,
        score: Callable[[Tree, Tree], jax.Array],
        identity: dict[str, str],
    ):
        """Opens the cache of one model.

        Args:
            cfg: the run's configuration.
            placement: its devices.
            name: the model's name among the readers.
            score: (parameters, fields) -> f32[b 2], of the chosen and the rejected answer.
            identity: fingerprints of the model's weights and tokenizer, its storage and arithmetic.
        """
        self.cfg, self.placement, self.name = cfg, placement, name
        self.store = Store(sources.cache_root() / "reference", identity, rows={"reference": ((2,), np.float32)})
        self._score = jax.jit(score)
        # By identity of the pairs, which are held so that an id stays their own.
        self._keys_by_id: dict[int, tuple[tuple[Pair, ...], list[bytes]]] = {}

    def fill(self, data: Preferences, params: Tree) -> int:
        """Computes and stores the missing pairs with the frozen model; returns how many."""
        mesh = self.placement.readers[self.name].mesh

        def read(positions: list[int]) -> Batch:
            fields = data.collate(positions)["readers"][self.name]
            return {"reference": jax.device_get(self._score(params, place.put_eval(fields, mesh)))}

        size = place.round_up(self.cfg.eval.batch, self.placement.data)
        what = "the reference model's log-probabilities"
        return self.store.fill(self._keys(data), read, batch=size, what=what)

    def lookup(self, data: Preferences) -> CachedRows:
        """Returns positions -> {"reference": f32[b 2]}."""
        return CachedRows(self.store, self._keys(data))

    def _keys(self, data: Preferences) -> list[bytes]:
        """Returns each pair's key, computed once a data set."""
        if id(data.pairs) not in self._keys_by_id:
            self._keys_by_id[id(data.pairs)] = (data.pairs, [_key(pair) for pair in data.pairs])
        return self._keys_by_id[id(data.pairs)][1]


def _key(pair: Pair) -> bytes:
    rows = [(len(pair.prompt), np.concatenate([pair.prompt, reply])) for reply in (pair.chosen, pair.rejected)]
    flags = [np.arange(len(ids)) >= start for start, ids in rows]
    return key_of(np.concatenate([ids for _, ids in rows]), np.concatenate(flags))
