"""Wire of kind "cache": nothing is trained, each frozen reader's own keys and values are its messages."""

import functools
from collections.abc import Sequence

import jax

from lw_jax.core.config import Config
from lw_jax.core.types import Example, Tree
from lw_jax.data import batches, examples, prompt_tokens, tokens
from lw_jax.data.batches import Encoded
from lw_jax.data.tokens import ByteTokenizer
from lw_jax.evals import cache_rows
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.hub import weights
from lw_jax.models import cache_message, wire
from lw_jax.recipes import cache_start
from lw_jax.recipes.wire_readers import WireReaders
from lw_jax.training import checkpoint_record
from lw_jax.training.recipe import Weights
from sharding import place, rules, tables
from sharding.placement import Placement

ANY = 2**30  # tokens of a text: the readers' limits count, not an encoder's


class CacheWire(WireReaders):
    """See `training.recipe.Recipe`. Trainable: {"codes": {reader's name: `cache_message.abstract`}}."""

    def __init__(self, cfg: Config, placed: Placement, *, outline: bool = False):
        """Locates the model files; an `outline` needs none: it has shapes alone."""
        super().__init__(cfg, placed, outline=outline)
        encoder = wire.EncoderSpec("cache", slots=1, width=cfg.encoder.width, pooling="", layers=0, window=1, body=None)
        self.wire = wire.Wire(encoder, self._make_readers(kind="kv"))

    @functools.cached_property
    def _abstract(self) -> Weights:
        width = self.cfg.encoder.width
        codes = {name: cache_message.abstract(one.config, width) for name, one in self.wire.readers.items()}
        return Weights({"codes": codes}, self._abstract_readers(self.wire.readers))

    @functools.cached_property
    def _shardings(self) -> Weights:
        shapes = self.abstract()
        codes = rules.shardings(tables.TRAINABLE, shapes.trainable, self.placement.learner, name="trainable")
        return Weights(codes, self._reader_shardings(shapes.frozen))

    def load_frozen(self) -> Tree:
        """Streams the readers' weights into their shards."""
        return self._load_readers(self.shardings().frozen)

    def build(self, frozen: Tree | None = None) -> Weights:
        """Loads the readers unless given, and computes their codes from the training texts."""
        readers: Tree = self.load_frozen() if frozen is None else frozen
        codes = cache_start.start(self, readers)
        return Weights(jax.device_put({"codes": codes}, self.shardings().trainable), readers)

    def codes(self, trainable: Tree) -> dict[str, Tree]:
        """Returns each reader's code on its mesh."""
        return {name: place.replicate(trainable["codes"][name], at.mesh) for name, at in self.placement.readers.items()}

    def bench(self, codes: dict[str, Tree], frozen: Tree, functions: CacheFunctions) -> cache_rows.CacheBench:
        """Returns what evaluation rows are measured with."""
        return cache_rows.CacheBench(
            functions,
            codes,
            frozen,
            ratio=self.cfg.encoder.ratio,
            decode={name: tokenizer.decode for name, tokenizer in self.tokenizers.items()},
            place=lambda batch, name: place.put_eval(batch, functions.mesh_of(name)),
            fetch=lambda rows, name: place.local_rows(rows, functions.mesh_of(name)),
        )

    # --- data

    @functools.cached_property
    def layout(self) -> prompt_tokens.Layout:
        """Returns the settings that determine an example's token ids."""
        cfg = self.cfg
        return prompt_tokens.Layout(
            prompt=cfg.prompt,
            readers={name: prompt_tokens.Reader(self.tokenizers[name], llm.template) for name, llm in cfg.llms.items()},
            source=ByteTokenizer(),
            window=ANY,
            windows=1,
            slots=1,
            width=1,
            data=cfg.data,
        )

    def examples(self, split: examples.Split) -> list[Example]:
        """Returns the questions of a split."""
        return examples.load(self.cfg.data, split, seed=self.cfg.seed)

    def encode(self, found: Sequence[Example]) -> Encoded:
        """Returns questions as token ids, with the fields of all rows."""
        encoded = batches.encode(found, layout=self.layout, rows=cache_rows.FIELDS)
        return cache_rows.attach(encoded, self.layout)

    # --- identity

    def identity(self) -> dict[str, str]:
        """Returns the fingerprints of the readers and their tokenizers."""
        readers = {f"llms/{name}": weights.fingerprint(at) for name, at in self.locations.items()}
        own = {
            f"{checkpoint_record.TOKENIZERS}llms/{name}": tokens.identify(one, template=self.cfg.llms[name].template)
            for name, one in self.tokenizers.items()
        }
        return {"encoder": f"cache {self.cfg.encoder.width}"} | readers | own

    def content(self) -> dict[str, str]:
        """Returns hashes of the questions of both splits."""
        return {split: examples.digest(self.examples(split)) for split in ("train", "validation")}
