"""Jitted functions of a wire of kind "cache": read a text twice, code it, and prompt a reader with its message."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.types import Tree
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.models import cache_choice, cache_code, cache_message, decoder, kv_prefix, rotary
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_message import Sent, Wanted
from lw_jax.models.decoder import SharedPrefix
from lw_jax.models.kv_prefix import Sizes
from lw_jax.models.wire import Prompt, embed_shared_prefix


class CacheFunctions(WireFunctions):
    """Functions of one wire, each compiled once for each reader and shape."""

    @functools.cached_property
    def read_twice(self):
        """Returns jitted (reader's parameters, fields, name, keep_queries) -> Reading.

        `fields`: "own", the text's ids, right-padded, and of one row "before" and "again", {"ids", "mask"}.
        """

        def run(params: Tree, fields: Mapping, name: str, keep_queries: bool) -> Reading:
            reader, own, again = self.wire.readers[name], fields["own"], fields["again"]
            return cache_choice.read_twice(
                params,
                reader.config,
                decoder.embed(params, own["ids"]),
                mask=own["mask"],
                again=SharedPrefix(decoder.embed(params, again["ids"][:1]), again["mask"][:1]),
                shared_prefix=embed_shared_prefix(params, fields["before"]),
                keep_queries=keep_queries,
                mode=reader.mode,
            )

        return jax.jit(run, static_argnames=("name", "keep_queries"))

    @functools.cached_property
    def encode(self):
        """Returns jitted (code, Reading, mask of "before", counts [l b k], steps [b], name, sizes) -> Sent of each."""

        def run(  # noqa: PLR0913
            code: Tree,
            reading: Reading,
            before: jax.Array,
            counts: list[jax.Array],
            step: jax.Array,
            name: str,
            sizes: Sizes | None,
        ) -> list[Sent]:
            seen = _count(before)
            kept = [cache_choice.choose(reading.scores, reading.text.mask, count) for count in counts]
            settings = {"seen": seen, "sizes": sizes, "factors": self.wire.readers[name].mode.factors}
            return cache_message.encode(self.wire.readers[name].config, code, reading, kept, step, **settings)

        return jax.jit(run, static_argnames=("name", "sizes"))

    @functools.cached_property
    def want(self):
        """Returns jitted (Reading, mask of "before", count [l b k], name, sizes) -> what numbers should say."""

        def run(reading: Reading, before: jax.Array, count: jax.Array, name: str, sizes: Sizes | None) -> Wanted:
            seen = _count(before)
            kept = cache_choice.choose(reading.scores, reading.text.mask, count)
            return cache_message.want(self.wire.readers[name].config, reading, kept, seen=seen, sizes=sizes)

        return jax.jit(run, static_argnames=("name", "sizes"))

    @functools.cached_property
    def solve(self):
        """Returns jitted (code, what numbers should say, steps [b], factors) -> numbers [b t w], not rounded."""
        return jax.jit(cache_message.solve, static_argnames="factors")

    @functools.cached_property
    def fit_biases(self):
        """Returns jitted (code, Reading, mask of "before", kept, numbers, steps, name, sizes) -> biases [l b t k]."""

        def run(  # noqa: PLR0913
            code: Tree,
            reading: Reading,
            before: jax.Array,
            kept: jax.Array,
            numbers: jax.Array,
            step: jax.Array,
            name: str,
            sizes: Sizes,
        ) -> jax.Array:
            seen, config = _count(before), self.wire.readers[name].config
            return cache_message.fit_biases(config, code, reading, kept, numbers, step, seen=seen, sizes=sizes)

        return jax.jit(run, static_argnames=("name", "sizes"))

    @functools.cached_property
    def read_states(self):
        """Returns jitted (reader's parameters, fields of `read_twice`, name) -> states bf16[b t n], scores and power.

        The last two are those of a `Reading`, f32[l b t k].
        """

        def run(params: Tree, fields: Mapping, name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
            kv, scores, power, _ = self.read_twice(params, fields, name, False)
            return cache_code.states(kv.k, kv.v).astype(jnp.bfloat16), scores, power

        return jax.jit(run, static_argnames="name")

    def prompt_from_cache(  # noqa: PLR0913
        self, params: Tree, code: Tree, fields: Mapping, sent: Sent, mask: jax.Array | np.ndarray, name: str
    ) -> Prompt:
        """Returns the prompt of the opening, a message, whose missing keys are masked, and the question."""
        opening = self._opening(params, fields["before"], name)
        return self._prompt_from_cache(params, code, fields["after"], sent, mask, name, opening)

    @functools.cached_property
    def _prompt_from_cache(self):
        def build(  # noqa: PLR0913
            params: Tree,
            code: Tree,
            after: Mapping,
            sent: Sent,
            mask: jax.Array,
            name: str,
            opening: decoder.KVPrefix | None,
        ) -> Prompt:
            x = decoder.embed(params, after["ids"])
            own = self._constrain(cache_message.decode(code, sent, mask, x.dtype), name)
            if opening is not None:
                own = self._constrain(kv_prefix.prepend(opening, own), name)
            return Prompt(x, after["mask"], kv_prefix=own)

        return jax.jit(build, static_argnames="name")

    @functools.cached_property
    def prompt_packed(self):
        """Returns jitted (reader's parameters, code, fields, Sent, mask, name, sizes) -> Prompt.

        It is that of `prompt_from_cache`, but its message takes the memory of the kept keys alone, by layer and head
        as many as `sizes`.
        """

        def build(  # noqa: PLR0913
            params: Tree, code: Tree, fields: Mapping, sent: Sent, mask: jax.Array, name: str, sizes: Sizes
        ) -> Prompt:
            after, before = fields["after"], embed_shared_prefix(params, fields["before"])
            x = decoder.embed(params, after["ids"])
            config, seen = self.wire.readers[name].config, 0 if before is None else before.mask.sum()
            packed = cache_message.decode_packed(config, code, sent, mask, sizes, seen=seen, dtype=x.dtype)
            return Prompt(x, after["mask"], before, packed=packed)

        return jax.jit(build, static_argnames=("name", "sizes"))

    def packs(self, name: str) -> bool:
        """Returns whether a reader can have a message's keys without what stands between them (`open_packed`)."""
        config = self.wire.readers[name].config
        return not config.window and not isinstance(config.rope_scaling, rotary.LongRope)


def _count(before: jax.Array) -> jax.Array:
    """Returns i32[1 1]: the tokens that stand before all texts."""
    return before[:1].sum(axis=1, keepdims=True, dtype=jnp.int32)


def count_kept(code: Tree, lengths: np.ndarray, ratio: int) -> np.ndarray:
    """Returns i32[l b k]: the positions of texts of these lengths that each head keeps, one of `ratio` in all."""
    return cache_choice.count_kept(np.asarray(code["tables"][ratio - 1]), lengths)


def steps_of(code: Tree, rows: int, ratio: int) -> np.ndarray:
    """Returns f32[b]: the step of so many texts' messages at a ratio."""
    return np.full(rows, code["step"][ratio - 1], np.float32)


def sizes_if_fitted(code: Tree, width: int, ratio: int) -> Sizes | None:
    """Returns `sizes_of` where messages at a ratio have fitted values and biases."""
    return sizes_of(code, width, ratio) if code["fitted"][ratio - 1] else None


def sizes_of(code: Tree, width: int, ratio: int) -> Sizes:
    """Returns how many keys each head has of a text of at most `width` tokens."""
    count = count_kept(code, np.array([width]), ratio)[:, 0]
    return tuple(tuple(int(one) for one in row) for row in count)
