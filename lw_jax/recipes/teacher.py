"""On-disk cache of the teacher's (text-prompted reader's) likeliest tokens, one entry an example."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import precision, validation
from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.data.batches import Batch, Encoded
from lw_jax.data.frozen_cache import CachedRows, Store, key_of
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
            "arithmetic": precision.resolve(cfg.compute.dtype, placement.platform),
        }
        self._identities = identities
        self._waiting: list[Encoded] = []
        self._readers: Tree | None = None

    @functools.cached_property
    def stores(self) -> dict[str, Store]:
        found = {}
        for name in self.wire.readers:
            shape = self.cfg.data.answer_tokens, self._count(name)
            rows = {"ids": (shape, np.int32), "logp": (shape, np.float16)}
            found[name] = Store(sources.cache_root() / "teacher", self._meaning | self._identities[name], rows=rows)
        return found

    def _count(self, name: str) -> int:
        return min(self.cfg.loss.teacher_k, self.wire.readers[name].config.vocab)

    def attach(self, encoded: Encoded) -> Encoded:
        """Returns the data set with teacher tokens in place of its text prompts, available once readers are loaded.

        Raises:
          UserError: there are several processes, of which one alone can fill a cache, or it cannot be made.
        """
        validation.check_processes(self.cfg, jax.process_count())
        self._waiting.append(encoded)
        self._fill()
        readers = {
            name: {key: field for key, field in fields.items() if key != "text"}
            for name, fields in encoded.readers.items()
        }
        return dataclasses.replace(
            encoded, readers=readers, teachers={name: self._lookup(name, encoded) for name in self.wire.readers}
        )

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

    def _lookup(self, name: str, encoded: Encoded) -> CachedRows:
        return self.stores[name].lookup(keys_of(encoded, name), length=encoded.readers[name]["answer"].width)

    def _read(self, name: str, encoded: Encoded, positions: list[int]) -> Batch:
        """Returns the rows of some examples, padded to the store's length."""
        fields = place.put_eval(encoded.collate(positions)["readers"][name], self.placement.readers[name].mesh)
        assert self._readers is not None
        ids, logp = jax.device_get(self._likeliest(self._readers[name], fields, name))
        missing = ((0, 0), (0, self.cfg.data.answer_tokens - ids.shape[1]), (0, 0))
        return {"ids": np.pad(ids, missing), "logp": np.pad(logp, missing)}

    @functools.cached_property
    def _likeliest(self):
        def run(params: Tree, fields: Mapping, name: str) -> tuple[jax.Array, jax.Array]:
            text = wire.text_prompt(params, fields["text"])
            logits = self.wire.answer_logits(params, name, text, fields)
            return likeliest(logits, count=self._count(name))

        return jax.jit(run, static_argnames="name")


def keys_of(encoded: Encoded, name: str) -> list[bytes]:
    """Returns, for each example, the digest of the reader's input: text prompt and answer tokens."""
    fields = encoded.readers[name]
    return [key_of(text, answer) for text, answer in zip(fields["text"].ids, fields["answer"].ids, strict=True)]


def likeliest(logits: jax.Array, *, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns ids and log-probabilities [b t k] of the likeliest tokens."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=2)
    values, ids = jax.lax.top_k(logp, count)
    return ids, values
