"""Wire of kind "cache": each frozen reader's own keys and values are its messages; their codes may be trained."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lw_jax.core.config import Config
from lw_jax.core.files import content_hash
from lw_jax.core.types import Example, LossTerms, Tree
from lw_jax.data import batches, examples, prompt_tokens
from lw_jax.data.batches import Encoded
from lw_jax.data.tokens import ByteTokenizer
from lw_jax.evals import cache_rows
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.models import cache_message, decoder, kv_prefix, wire
from lw_jax.models.cache_message import Sent
from lw_jax.recipes import cache_start, wire_shapes
from lw_jax.recipes.curriculum import Curriculum, longest_passage
from lw_jax.recipes.wire_readers import WireReaders
from lw_jax.training.optimizers import Rates
from lw_jax.training.recipe import Weights
from sharding import place, rules, tables
from sharding.placement import Placement

ANY = 2**30  # tokens of a text: the readers' limits count, not an encoder's


class CacheWire(WireReaders):
    """See `training.recipe.Recipe`. Trainable: {"codes": {reader's name: `cache_message.abstract`}}."""

    splits_computation = False  # a basis goes over the keys of all heads, and is on every device

    def __init__(self, cfg: Config, placed: Placement, *, outline: bool = False):
        super().__init__(cfg, placed, outline=outline)
        encoder = wire.EncoderSpec(slots=1, width=cfg.encoder.width, pooling="", layers=0, window=1, body=None)
        self.wire = wire.Wire(encoder, self._make_readers(kind="kv"))
        self.functions = CacheFunctions(self.wire, placed)

    @property
    def rates(self) -> Rates:
        """Returns the learning rate multiples: means, scales and bases are trained, tables and statistics are not."""
        return ("codes/[^/]*/(mean|scale|basis)", 1.0), ("codes/.*", 0.0)

    @functools.cached_property
    def abstract(self) -> Weights:
        width = self.cfg.encoder.width
        codes = {name: cache_message.abstract(reader.config, width) for name, reader in self.wire.readers.items()}
        return Weights({"codes": codes}, self._abstract_readers())

    @functools.cached_property
    def shardings(self) -> Weights:
        trainable = self.abstract.trainable
        codes = rules.shardings(tables.TRAINABLE, trainable, self.placement.learner, name="trainable")
        return Weights(codes, self._reader_shardings())

    def load_frozen(self) -> Tree:
        return self._load_readers(self.shardings.frozen)

    def build(self, frozen: Tree | None = None) -> Weights:
        """Loads the readers unless given, and computes their codes from the training texts."""
        readers: Tree = self.load_frozen() if frozen is None else frozen
        codes = cache_start.start(self, readers)
        return Weights(jax.device_put({"codes": codes}, self.shardings.trainable), readers)

    def codes(self, trainable: Tree) -> dict[str, Tree]:
        """Returns each reader's code on its mesh."""
        return {name: place.replicate(trainable["codes"][name], at.mesh) for name, at in self.placement.readers.items()}

    # --- data

    @functools.cached_property
    def layout(self) -> prompt_tokens.Layout:
        return self._make_layout(source=ByteTokenizer(), window=ANY, windows=1, slots=1, width=1)

    @functools.cached_property
    def curriculum(self) -> Curriculum:
        attach = functools.partial(cache_rows.attach, layout=self.layout)
        return Curriculum(self.cfg, self.layout, attach, rows=("context",))

    def encode(self, examples: Sequence[Example]) -> Encoded:
        """Returns questions as token ids, with the fields of all rows."""
        return cache_rows.attach(batches.encode(examples, layout=self.layout, rows=cache_rows.FIELDS), self.layout)

    def longest_prompts(self) -> dict[str, int]:
        limits = {"data.context_tokens": self.cfg.data.context_tokens, "the stages' lengths": longest_passage(self.cfg)}
        return {f"{keys}, read twice,": 2 * length + wire_shapes.AGAIN for keys, length in limits.items()}

    # --- loss

    def share(self, trainable: Tree, source: Tree, rng: jax.Array, frozen: Tree = None) -> jax.Array:
        """Returns f32[b]: each message's ratio. Readers share nothing else: each has its own text and code."""
        del trainable, rng, frozen
        return source["channel"][:, 0].astype(jnp.float32)

    def part(self, name: str, trainable: Tree) -> Tree:
        return trainable["codes"][name]

    def branch(self, name: str, part: Tree, frozen: Tree, fields: Tree, shared: Tree, rng: jax.Array) -> LossTerms:
        """Returns one reader's loss terms from messages at the ratios `shared`.

        What a message says is a constant: the gradient is that of reading it. (At the optimum of the numbers that are
        sent, that of the error of what is read is the whole one.)
        """
        del rng
        reader, still = self.wire.readers[name], jax.lax.stop_gradient(part)
        ratio, mask = jax.lax.stop_gradient(shared).astype(jnp.int32) - 1, fields["own"]["mask"]
        text = {key: fields[key] for key in ("own", "before", "again")}
        count = jnp.rint(still["tables"][ratio] * mask.sum(axis=1, dtype=jnp.int32)[:, None, None].astype(jnp.float32))
        count, step = jnp.moveaxis(count.astype(jnp.int32), 1, 0), still["step"][ratio]

        def write(*ways: bool) -> Sent:
            reading = self.functions.read_twice(frozen, text, name, any(ways))
            sizes = kv_prefix.all_keys(reader.config, mask.shape[1])
            messages = (
                self.functions.encode(still, reading, [count], step, name, (sizes if way else None,))[0] for way in ways
            )
            return functools.reduce(functools.partial(cache_message.choose, still["fitted"][ratio] > 0), messages)

        # The code is the same on all shards: a batch's ratios would make it a select, which computes both.
        sent = jax.lax.cond(jnp.any(still["fitted"] > 0), lambda: write(True, False), lambda: write(False))
        after = decoder.embed(frozen, fields["after"]["ids"])
        prefix = cache_message.decode(part, sent, after.dtype)
        prefix = prefix._replace(k=reader.constrain(prefix.k), v=reader.constrain(prefix.v))
        before = wire.embed_shared_prefix(frozen, fields["before"])
        prompt = wire.Prompt(after, fields["after"]["mask"], before, prefix)
        return self.measure(frozen, name, self.wire.answer_states(frozen, name, prompt, fields), fields)

    # --- planning

    def batch_widths(self) -> Tree:
        return wire_shapes.cache_example(self.cfg, self.wire.readers)

    validation_widths = batch_widths

    # --- identity

    def identity(self) -> dict[str, str]:
        return {"encoder": f"cache {self.cfg.encoder.width}"} | super().identity()

    def content(self) -> dict[str, str]:
        """Returns hashes of the questions of both splits, and with the first one's of its passages."""
        content = {split: examples.digest(self.curriculum.examples(split)) for split in ("train", "validation")}
        if passages := self.curriculum.passages:
            content["train"] = content_hash([content["train"], passages])
        return content
