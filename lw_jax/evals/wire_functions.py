"""Jitted functions of a trained wire for evaluation and inference: encode, prompt, score, generate."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lw_jax.core.compiling import jitted
from lw_jax.core.types import Tree
from lw_jax.losses import token_losses
from lw_jax.models import attention_matching, decode, decoder, kv_prefix
from lw_jax.models.adapter import KeysValues
from lw_jax.models.decoder import KVPrefix
from lw_jax.models.wire import (
    Prompt,
    Wire,
    compacted_prompt,
    embed_shared_prefix,
    taught_prompt,
    text_prompt,
    wire_prompt,
)
from sharding import place
from sharding.placement import Placement

_T = TypeVar("_T")


class WireFunctions:
    """Functions of one wire, each compiled once for each reader and shape."""

    def __init__(self, wire: Wire, placement: Placement):
        self.wire, self.placement = wire, placement
        self._separate: dict[str, tuple[Tree, tuple[Tree, ...]]] = {}  # see `_unstacked`
        self._openings: dict[str, tuple[Tree, KVPrefix]] = {}  # see `_opening`

    def mesh_of(self, name: str | None) -> Mesh:
        """Returns a reader's mesh; None: the encoder's."""
        return self.placement.learner if name is None else self.placement.readers[name].mesh

    def place(self, rows: Tree, name: str | None) -> Tree:
        """Returns this process's rows [b ...] on a reader's mesh (None: the encoder's), split over its data axis."""
        return place.put_eval(rows, self.mesh_of(name))

    def fetch(self, rows: Tree, name: str | None) -> Tree:
        """Returns this process's rows of arrays [B ...] on that mesh, on the host."""
        return place.local_rows(rows, self.mesh_of(name))

    @jitted()
    def encode(self, trainable: Tree, source: Mapping, body: Tree | None = None) -> jax.Array:
        """See `Wire.encode`."""
        return self.wire.encode(trainable, source, body)

    def prompt_from_latents(
        self, trainable: Tree, params: Tree, fields: Mapping, latents: jax.Array, name: str
    ) -> Prompt:
        """Returns a reader's prompt on its mesh; its adapter and the latents are moved there first.

        Keys and values of a wire come with those of the opening.
        """
        mesh, opening = self.mesh_of(name), self._opening(params, fields["before"], name)
        adapter, latents = place.replicate(trainable["adapters"][name], mesh), place.rows(latents, mesh)
        return self._wire_prompt(adapter, params, fields, latents, name, opening)

    @jitted("name")
    def _wire_prompt(  # noqa: PLR0913
        self, adapter: Tree, params: Tree, fields: Mapping, latents: jax.Array, name: str, opening: KVPrefix | None
    ) -> Prompt:
        prompt = wire_prompt(params, fields, self.wire.prefix(adapter, name, latents, "answer"))
        if opening is None or prompt.kv_prefix is None:
            return prompt.joined()
        prefix = self._constrain(kv_prefix.prepend(opening, prompt.kv_prefix), name)
        return dataclasses.replace(prompt, shared_prefix=None, kv_prefix=prefix)

    def reuse_opening(
        self, params: Tree, before: Mapping, prompt: Prompt, name: str, *, columns: int, skipped: int
    ) -> Prompt:
        """Returns a text's prompt with the opening as a message's has it: of a wire of keys and values, read already.

        The first `skipped` positions of the prompt are those of the first `columns` of `before`.
        """
        opening = self._opening(params, before, name)
        return prompt if opening is None else self._reuse_opening(opening, prompt, name, columns, skipped)

    @jitted("name", "columns", "skipped")
    def _reuse_opening(self, opening: KVPrefix, prompt: Prompt, name: str, columns: int, skipped: int) -> Prompt:
        prefix = KVPrefix(opening.k[:, :, :columns], opening.v[:, :, :columns], opening.mask[:, :columns])
        prefix = self._constrain(kv_prefix.repeat(prefix, len(prompt.mask)), name)
        return Prompt(prompt.embeddings[:, skipped:], prompt.mask[:, skipped:], kv_prefix=prefix)

    def _constrain(self, prefix: KVPrefix, name: str) -> KVPrefix:
        constrain = self.wire.readers[name].constrain
        return prefix._replace(k=constrain(prefix.k), v=constrain(prefix.v))

    def _opening(self, params: Tree, before: Mapping, name: str) -> KVPrefix | None:
        """Returns the keys and values of what stands before every message of a wire of keys and values.

        It is the same in all prompts of a reader, and read once: for one question a pass over a few tokens costs a
        large reader as much as the question, since both read all weights.
        """
        if self.wire.readers[name].kind != "kv" or not before["ids"].shape[1]:
            return None
        return _keep(self._openings, name, params["layers"], lambda: self._read_opening(params, before, name))

    @jitted("name")
    def _read_opening(self, params: Tree, before: Mapping, name: str) -> KVPrefix:
        reader, shared = self.wire.readers[name], embed_shared_prefix(params, before)
        assert shared is not None, "an opening has tokens"
        mode = dataclasses.replace(reader.mode, constrain=decoder.unchanged)  # one row does not divide over devices
        return kv_prefix.take(params, reader.config, shared.x, mask=shared.mask, mode=mode)

    def prefix(self, trainable: Tree, latents: jax.Array, name: str) -> jax.Array | KeysValues:
        """Returns a reader's prefix and, behind it, the task's vector; the adapter is moved to its mesh first."""
        return self._prefix(place.replicate(trainable["adapters"][name], self.mesh_of(name)), latents, name)

    @jitted("name")
    def _prefix(self, adapter: Tree, latents: jax.Array, name: str) -> jax.Array | KeysValues:
        return self.wire.prefix(adapter, name, latents, "answer")

    @jitted()
    def prompt_from_text(self, params: Tree, tokens: Mapping) -> Prompt:
        """See `models.wire.text_prompt`."""
        return text_prompt(params, tokens)

    @jitted()
    def prompt_from_taught_text(self, params: Tree, fields: Mapping, vectors: jax.Array) -> Prompt:
        """See `models.wire.taught_prompt`."""
        return taught_prompt(params, fields, vectors)

    @jitted("name")
    def prompt_from_compacted_text(self, params: Tree, fields: Mapping, vectors: jax.Array | None, name: str) -> Prompt:
        """Returns a reader's prompt of a reduced text, of the fields of `control_rows.attach_ceiling`."""
        reader, before = self.wire.readers[name], fields["before"]["mask"].sum(axis=1, keepdims=True)
        text = attention_matching.join(params, fields["context"], fields["probe"], before=before)
        compacted = attention_matching.compact(params, reader.config, text, fields["kept"]["mask"], mode=reader.mode)
        return compacted_prompt(params, fields, self._constrain(compacted, name), vectors)

    @jitted("name")
    def score(self, params: Tree, prompt: Prompt, fields: Mapping, name: str) -> dict[str, jax.Array]:
        """Returns nll, hits, first, first5 and tokens, each [b], of the reference answers."""
        return scores_of(self.wire.answer_logits(params, name, prompt, fields), fields)

    def generate(self, params: Tree, prompt: Prompt, name: str, max_new_tokens: int) -> jax.Array:
        """Returns a reader's greedy ids [b n] for its parameters, -1 after the stop."""
        if not self._by_token(name):
            return self._generate(params, prompt, name, max_new_tokens)
        return self._collect(self.tokens(params, prompt, name, max_new_tokens), name, max_new_tokens)

    def answer(
        self, params: Tree, prompt: Prompt, fields: Mapping, name: str, max_new_tokens: int
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns a reader's ids as `generate` and its scores as `score`, from one pass over the prompt."""
        if not self._by_token(name):
            return self._answer(params, prompt, fields, name, max_new_tokens)
        token, scores, memory = self._begin_with_answer(params, prompt, fields, name, max_new_tokens)
        tokens = self._follow_all(params, token, memory, name, max_new_tokens)
        return self._collect(tokens, name, max_new_tokens), scores

    def generate_program(self, name: str) -> Any:
        """Returns the jitted function with which `generate` reads a prompt; it takes the same arguments."""
        return self.begin if self._by_token(name) else self._generate

    def answer_program(self, name: str) -> Any:
        """Returns the jitted function with which `answer` reads a prompt; it takes the same arguments."""
        return self._begin_with_answer if self._by_token(name) else self._answer

    def _collect(self, tokens: Iterator[np.ndarray], name: str, max_new_tokens: int) -> jax.Array:
        """Returns the ids [b n] of all rows until each has stopped, -1 after the stop."""
        ids, done = [], np.zeros((), bool)
        for token in tokens:
            done = done | np.isin(token, self.wire.readers[name].stops)
            ids.append(np.where(done, -1, token))
            if done.all():
                break
        generated = np.stack(ids, axis=1).astype(np.int32)
        missing = ((0, 0), (0, max_new_tokens - generated.shape[1]))
        return place.rows(np.pad(generated, missing, constant_values=-1), self.mesh_of(name))

    @jitted("name", "max_new_tokens")
    def _generate(self, params: Tree, prompt: Prompt, name: str, max_new_tokens: int) -> jax.Array:
        return self.wire.generate(params, name, prompt, max_new_tokens=max_new_tokens)

    @jitted("name", "max_new_tokens")
    def _answer(self, params: Tree, prompt: Prompt, fields: Mapping, name: str, max_new_tokens: int) -> tuple:
        ids, logits = self.wire.answer(params, name, prompt, fields, max_new_tokens=max_new_tokens)
        return ids, scores_of(logits, fields)

    def tokens(self, params: Tree, prompt: Prompt, name: str, max_new_tokens: int) -> Iterator[np.ndarray]:
        """Yields the likeliest next ids [b] of all rows, whatever has stopped, by a program for each token."""
        token, memory = self.begin(params, prompt, name, max_new_tokens)
        yield from self._follow_all(params, token, memory, name, max_new_tokens)

    def _follow_all(
        self, params: Tree, token: jax.Array, memory: Tree, name: str, max_new_tokens: int
    ) -> Iterator[np.ndarray]:
        """Yields the ids [b] that `begin` found and those that follow; the memory is used up."""
        if self._by_token(name):
            memory = self._unstack_memory(memory)
            params = params | {"layers": self._unstacked(params["layers"], name)}
        for number in range(max_new_tokens):
            yield np.asarray(token)
            if number + 1 < max_new_tokens:
                token, memory = self.follow(params, token, memory, name)

    def _by_token(self, name: str) -> bool:
        """Returns whether unstacked layers go with a program for each token.

        XLA's CPU backend transposes them for a loop inside a program, to a slower form.
        """
        return self.wire.readers[name].unstacked and self.placement.platform == "cpu" and jax.process_count() == 1

    def _unstacked(self, layers: Tree, name: str) -> tuple[Tree, ...]:
        return _keep(self._separate, name, layers, lambda: jax.jit(decode.unstack_layers)(layers))

    @jitted()
    def _unstack_memory(self, memory: Tree) -> Tree:
        return decode.unstack_memory(memory)

    @jitted("name")
    def open_cache(self, params: Tree, prompt: Prompt, name: str) -> decoder.Cache:
        """Returns the cache of what stands before a prompt's embeddings."""
        return self.wire.open_cache(params, name, prompt)

    @jitted("name", "max_new_tokens")
    def begin(self, params: Tree, prompt: Prompt, name: str, max_new_tokens: int) -> tuple[jax.Array, Tree]:
        """Returns the likeliest first ids [b], and the memory that `follow` takes."""
        logits, memory, _ = self.wire.begin(params, name, prompt, max_new_tokens=max_new_tokens)
        return _likeliest(logits), memory

    @jitted("name", "max_new_tokens")
    def _begin_with_answer(
        self, params: Tree, prompt: Prompt, fields: Mapping, name: str, max_new_tokens: int
    ) -> tuple[jax.Array, dict[str, jax.Array], Tree]:
        first, memory, logits = self.wire.begin(params, name, prompt, fields, max_new_tokens=max_new_tokens)
        return _likeliest(first), scores_of(logits, fields), memory

    @jitted("name", donate=("memory",))
    def follow(self, params: Tree, token: jax.Array, memory: Tree, name: str) -> tuple[jax.Array, Tree]:
        """Returns the likeliest next ids [b], and the memory behind them; that which was given is used up."""
        logits, memory = self.wire.follow(params, name, token, memory)
        return _likeliest(logits), memory


def _keep(cache: dict[str, tuple[Tree, _T]], name: str, layers: Tree, make: Callable[[], _T]) -> _T:
    """Returns what was made of a reader's layers, made anew for other ones."""
    if name not in cache or cache[name][0] is not layers:
        cache[name] = layers, make()
    return cache[name][1]


def _likeliest(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def scores_of(logits: jax.Array, fields: Mapping) -> dict[str, jax.Array]:
    """Returns what `WireFunctions.score` measures of answers' logits [b t v]."""
    targets, weights = fields["targets"], fields["weights"]
    hits = (_likeliest(logits).astype(targets.dtype) == targets).astype(jnp.float32)
    gold = jnp.take_along_axis(logits[:, 0], targets[:, :1], axis=1)
    return {
        "nll": jnp.sum(token_losses.token_nll(logits, targets) * weights, axis=1),
        "hits": jnp.sum(hits * weights, axis=1),
        "first": hits[:, 0],
        "first5": (jnp.sum(logits[:, 0] > gold, axis=1) < 5).astype(jnp.float32),
        "tokens": jnp.sum(weights, axis=1),
    }
