"""Jitted functions of a wire of kind "cache": read a text twice, code it, and prompt a reader with its message."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.compiling import jitted
from lw_jax.core.types import Tree
from lw_jax.evals.wire_functions import WireFunctions, scores_of
from lw_jax.losses import token_losses
from lw_jax.models import cache_choice, cache_code, cache_message, decoder, kv_prefix
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_message import Sent, Wanted
from lw_jax.models.decoder import SharedPrefix
from lw_jax.models.kv_prefix import Sizes
from lw_jax.models.wire import Prompt, embed_shared_prefix, taught_prompt


class CacheFunctions(WireFunctions):
    """Functions of one wire, each compiled once for each reader and shape."""

    @jitted("name", "keep_queries")
    def read_twice(self, params: Tree, fields: Mapping, name: str, keep_queries: bool) -> Reading:
        """Returns texts read twice by a reader with these parameters.

        `fields`: "own", the text's ids, right-padded, and of one row "before" and "again", {"ids", "mask"}.
        """
        reader, text, again = self.wire.readers[name], fields["own"], fields["again"]
        return cache_choice.read_twice(
            params,
            reader.config,
            decoder.embed(params, text["ids"]),
            mask=text["mask"],
            again=SharedPrefix(decoder.embed(params, again["ids"][:1]), again["mask"][:1]),
            shared_prefix=embed_shared_prefix(params, fields["before"]),
            keep_queries=keep_queries,
            mode=reader.mode,
        )

    def write(self, code: Tree, reading: Reading, ratios: Sequence[int], name: str) -> list[Sent]:
        """Returns the messages of texts at each of the ratios, in the numbers of the first one.

        Where a ratio is fitted, the reading has kept its queries.
        """
        lengths = np.asarray(reading.text.mask).sum(axis=1)
        counts = [count_kept(code, lengths, ratio) for ratio in ratios]
        step = np.full(len(lengths), code["step"][ratios[0] - 1], np.float32)
        width = reading.text.mask.shape[1]
        sizes = tuple(sizes_of(code, width, ratio) if is_fitted(code, ratio) else None for ratio in ratios)
        return self.encode(code, reading, counts, step, name, sizes)

    @jitted("name", "sizes")
    def encode(  # noqa: PLR0913
        self,
        code: Tree,
        reading: Reading,
        counts: list[jax.Array],
        step: jax.Array,
        name: str,
        sizes: tuple[Sizes | None, ...],
    ) -> list[Sent]:
        """Returns the message for each of `counts` [l b k]; `step` [b]."""
        reader, kept = self.wire.readers[name], [_choose(reading, count) for count in counts]
        factors = reader.mode.factors
        return cache_message.encode(reader.config, code, reading, kept, step, sizes=sizes, factors=factors)

    @jitted("name", "sizes")
    def want(self, reading: Reading, count: jax.Array, name: str, sizes: Sizes | None) -> Wanted:
        """Returns what the numbers of a message with `count` [l b k] keys should say."""
        return cache_message.want(self.wire.readers[name].config, reading, _choose(reading, count), sizes=sizes)

    @jitted("name")
    def solve(self, code: Tree, wanted: Wanted, step: jax.Array, name: str) -> jax.Array:
        """Returns the numbers i32[b t w] of `want`, in steps [b]."""
        return cache_message.solve(code, wanted, step, self.wire.readers[name].mode.factors)

    @jitted("name", "sizes")
    def fit_biases(  # noqa: PLR0913
        self,
        code: Tree,
        reading: Reading,
        kept: jax.Array,
        numbers: jax.Array,
        step: jax.Array,
        name: str,
        sizes: Sizes,
    ) -> jax.Array:
        """Returns the biases [l b t k] of a message."""
        config = self.wire.readers[name].config
        return cache_message.fit_biases(config, code, reading, kept, numbers, step, sizes=sizes)

    @jitted("name")
    def read_states(self, params: Tree, fields: Mapping, name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns states bf16[b t n] of texts (fields of `read_twice`), and the scores and power of their `Reading`."""
        reading = self.read_twice(params, fields, name, False)
        states = cache_code.states(reading.text.k, reading.text.v)
        return states.astype(jnp.bfloat16), reading.scores, reading.power

    @jitted()
    def prompt_from_taught_parts(self, params: Tree, fields: Mapping, vectors: jax.Array) -> Prompt:
        """Returns `models.wire.taught_prompt` of the opening and the text as one context: "before" and "own"."""
        context = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), fields["before"], fields["own"])
        return taught_prompt(params, {"context": context, "asked": fields["asked"]}, vectors)

    def prompt_from_cache(  # noqa: PLR0913
        self, params: Tree, code: Tree, fields: Mapping, sent: Sent, name: str, sizes: Sizes | None = None
    ) -> Prompt:
        """Returns the prompt of the opening, a message and the question.

        Keys that a head does not keep are masked; with `sizes`, as many as each keeps, by layer and head, the message
        takes the memory of the kept keys alone.
        """
        opening = self._opening(params, fields["before"], name)
        return self._prompt_from_cache(params, code, fields["after"], sent, name, sizes, opening)

    @jitted("name", "sizes")
    def _prompt_from_cache(  # noqa: PLR0913
        self,
        params: Tree,
        code: Tree,
        after: Mapping,
        sent: Sent,
        name: str,
        sizes: Sizes | None,
        opening: decoder.KVPrefix | None,
    ) -> Prompt:
        x = decoder.embed(params, after["ids"])
        if sizes is None:
            prefix = self._constrain(cache_message.decode(code, sent, x.dtype), name)
            if opening is not None:
                prefix = self._constrain(kv_prefix.prepend(opening, prefix), name)
            return Prompt(x, after["mask"], kv_prefix=prefix)
        prefix, seen = None, jnp.int32(0)
        if opening is not None:
            prefix, seen = self._constrain(kv_prefix.repeat(opening, len(x)), name), opening.mask.sum()
        config = self.wire.readers[name].config
        packed = cache_message.decode_packed(config, code, sent, sizes, seen=seen, dtype=x.dtype)
        return Prompt(x, after["mask"], kv_prefix=prefix, packed=packed)

    @jitted("name")
    def answer_logits(self, params: Tree, prompt: Prompt, fields: Mapping, name: str) -> jax.Array:
        """Returns logits [b t v] of the reference answers."""
        return self.wire.answer_logits(params, name, prompt, fields)

    @jitted()
    def compare(self, text: jax.Array, logits: jax.Array, fields: Mapping) -> dict[str, jax.Array]:
        """Returns `score` of answers' logits, and "kl" [b], their summed divergence from those behind the text."""
        divergence = jnp.sum(token_losses.token_kl(text, logits) * fields["weights"], axis=1)
        return scores_of(logits, fields) | {"kl": divergence}


def _choose(reading: Reading, count: jax.Array) -> jax.Array:
    return cache_choice.choose(reading.scores, reading.text.mask, count)


def count_kept(code: Tree, lengths: np.ndarray, ratio: int) -> np.ndarray:
    """Returns i32[l b k]: the positions of texts of these lengths that each head keeps, one of `ratio` in all."""
    return cache_choice.count_kept(np.asarray(code["tables"][ratio - 1]), lengths)


def is_fitted(code: Tree, ratio: int) -> bool:
    """Returns whether messages at a ratio have fitted values and biases."""
    return bool(code["fitted"][ratio - 1])


def sizes_of(code: Tree, width: int, ratio: int) -> Sizes:
    """Returns how many keys each head has of a text of at most `width` tokens."""
    count = count_kept(code, np.array([width]), ratio)[:, 0]
    return tuple(tuple(int(size) for size in row) for row in count)
