"""On-disk cache of the reference model's log-probabilities, one entry a pair."""

from collections.abc import Callable

import jax
import numpy as np

from lw_jax.core import validation
from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.data import preferences
from lw_jax.data.batches import Batch
from lw_jax.data.frozen_cache import Store, key_of
from lw_jax.data.preferences import Preferences
from lw_jax.hub import sources
from sharding import place
from sharding.placement import Placement


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
        validation.check_processes(cfg, jax.process_count())
        self.cfg, self.placement, self.name = cfg, placement, name
        self.store = Store(sources.cache_root() / "reference", identity, rows={"reference": ((2,), np.float32)})
        self._score = jax.jit(score)
        # By identity of the pairs, which are held so that an id stays their own.
        self._keys_by_id: dict[int, tuple[tuple[preferences.Pair, ...], list[bytes]]] = {}

    def fill(self, data: Preferences, params: Tree) -> int:
        """Computes and stores the missing pairs with the frozen model; returns how many."""
        mesh = self.placement.readers[self.name].mesh

        def read(positions: list[int]) -> Batch:
            fields = data.collate(positions)["readers"][self.name]
            return {"reference": jax.device_get(self._score(params, place.put_eval(fields, mesh)))}

        size = place.round_up(self.cfg.eval.batch, self.placement.data)
        what = "the reference model's log-probabilities"
        return self.store.fill(self._keys(data), read, batch=size, what=what)

    def lookup(self, data: Preferences):
        """Returns positions -> {"reference": f32[b 2]}."""
        return self.store.lookup(self._keys(data))

    def _keys(self, data: Preferences) -> list[bytes]:
        """Returns each pair's key, computed once a data set."""
        if id(data.pairs) not in self._keys_by_id:
            self._keys_by_id[id(data.pairs)] = (data.pairs, [_key(pair) for pair in data.pairs])
        return self._keys_by_id[id(data.pairs)][1]


def _key(pair: preferences.Pair) -> bytes:
    rows = [(len(pair.prompt), np.concatenate([pair.prompt, reply])) for reply in (pair.chosen, pair.rejected)]
    flags = [np.arange(len(ids)) >= start for start, ids in rows]
    return key_of(np.concatenate([ids for _, ids in rows]), np.concatenate(flags))
