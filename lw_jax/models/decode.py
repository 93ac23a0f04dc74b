"""Cached generation inside one jitted loop, greedy or sampled."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.types import Tree
from lw_jax.models import decoder, rotary, ttt
from lw_jax.models.products import from_bits


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Static settings of generation. Temperature 0 is greedy."""

    max_new_tokens: int
    stops: tuple[int, ...]  # ids that end a row; the stop itself is not part of the answer
    temperature: float = 0.0
    unstacked: bool = False  # see `unstack_layers`


class _Loop(NamedTuple):
    step: jax.Array
    ids: jax.Array
    done: jax.Array
    token: jax.Array  # the last one, which the model has not read
    cache: Tree


# (token [b], unfinished rows [b], cache) -> (next logits [b v], cache)
Advance = Callable[[jax.Array, jax.Array, Tree], tuple[jax.Array, Tree]]


def sample(
    first: Float[Array, "b v"], cache: Tree, advance: Advance, *, sampling: Sampling, key: jax.Array
) -> Int[Array, "b n"]:
    """Draws token after token from the logits `first` on and returns ids [b, max_new_tokens]; -1 after a row's stop.

    The loop ends early when all rows have stopped. The last token is not read.
    """
    stops = jnp.asarray(sampling.stops, jnp.int32)

    def unfinished(state: _Loop) -> jax.Array:
        return (state.step < sampling.max_new_tokens) & ~jnp.all(state.done)

    def draw(logits: jax.Array, cache: Tree, state: _Loop) -> _Loop:
        token = _choose(logits, sampling.temperature, jax.random.fold_in(key, state.step))
        done = state.done | jnp.any(token[:, None] == stops[None, :], axis=1)
        ids = state.ids.at[:, state.step].set(jnp.where(done, -1, token))
        return _Loop(state.step + 1, ids, done, token, cache)

    def follow_token(state: _Loop) -> _Loop:
        return draw(*advance(state.token, ~state.done, state.cache), state)

    nothing = jnp.zeros(len(first), jnp.int32)
    ids = jnp.full((len(first), sampling.max_new_tokens), -1, jnp.int32)
    begun = draw(first, cache, _Loop(jnp.zeros((), jnp.int32), ids, nothing > 0, nothing, cache))
    return jax.lax.while_loop(unfinished, follow_token, begun).ids


def generate(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: decoder.DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    sampling: Sampling,
    key: jax.Array,
    mode: decoder.Mode = decoder.Mode(),
) -> Int[Array, "b n"]:
    """Continues a decoder's prompt embeddings; see `sample`.

    The last column of x must be a real token of every row (left-padded prompts). Where a row outgrows the short
    frequencies of a LongRope model, the whole text is processed again with the long ones, as transformers does.
    """
    first, memory, _ = begin(params, cfg, x, mask=mask, max_new_tokens=sampling.max_new_tokens, mode=mode)
    return continue_generation(params, cfg, first, memory, sampling=sampling, key=key, mode=mode)


def continue_generation(  # noqa: PLR0913
    params: Tree,
    cfg: decoder.DecoderConfig,
    first: Float[Array, "b v"],
    memory: Tree,
    *,
    sampling: Sampling,
    key: jax.Array,
    mode: decoder.Mode,
) -> Int[Array, "b n"]:
    """Continues from what `begin` returned; see `sample`."""
    if sampling.unstacked:
        # Without the barrier each iteration of the loop would slice them again.
        layers, memory = jax.lax.optimization_barrier((unstack_layers(params["layers"]), unstack_memory(memory)))
        params = params | {"layers": layers}
    following = functools.partial(follow, params, cfg, mode)
    return sample(first, memory, following, sampling=sampling, key=key)


def unstack_layers(layers: Tree) -> tuple[Tree, ...]:
    """Returns a stack of layers as separate arrays for each, for a loop over tokens; their memory goes with it.

    A scan copies each layer's slice of the stacks before using it. For one token that triples the bytes moved, and the
    weights' bytes are what a token takes its time for. Costs the layers' memory twice and longer compilation. Bits
    become floats here (`products.stack_dtype`): a product that has to convert them copies them too.
    """
    return from_bits(_unstack(layers))


def unstack_memory(memory: Tree) -> Tree:
    """Returns what `begin` remembers with a cache for each layer, which layers of `unstack_layers` take."""
    if not isinstance(memory, decoder.Cache):
        return unstack_memory(memory[0]), *memory[1:]  # with the text of a LongRope model
    k, v = jax.tree.map(lambda stack: stack[:, None], (memory.k, memory.v))  # each layer's is a stack of one
    return memory._replace(k=_unstack(k), v=_unstack(v), bias=None if memory.bias is None else _unstack(memory.bias))


def _unstack(stack: Tree) -> tuple[Tree, ...]:
    count = len(jax.tree.leaves(stack)[0])
    return tuple(jax.tree.map(operator.itemgetter(i), stack) for i in range(count))


def begin(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: decoder.DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    max_new_tokens: int,
    answer: tuple[Float[Array, "b a d"], Bool[Array, "b a"]] | None = None,
    cache: decoder.Cache | None = None,
    mode: decoder.Mode = decoder.Mode(),
) -> tuple[Float[Array, "b v"], Tree, Float[Array, "b c v"]]:
    """Reads a prompt and, in the same pass, an `answer` (embeddings and mask) that it then forgets.

    Returns the logits of the prompt's first new token, the memory with which `follow` goes on from it, and the logits
    that predict each of the answer's tokens and the one behind them (c = a + 1; without an answer the first alone).

    A `cache` holds what stands before x (`kv_prefix.open_cache`), with room for x, and behind it for the answer and for
    `max_new_tokens`, which share it. The memory is the cache, and of a LongRope model that may outgrow its short
    frequencies the embeddings of all its slots too.
    """
    length, behind, joined, real = x.shape[1], 0, x, mask
    if answer is not None:
        behind = answer[0].shape[1]
        joined, real = (jnp.concatenate(pair, axis=1) for pair in ((x, answer[0]), (mask, answer[1])))
    if cache is None:
        cache = decoder.empty_cache(cfg, x.shape[0], length + max(max_new_tokens, behind), x.dtype)
    size = cache.valid.shape[1]
    if _outgrows(cfg, size):  # the answer's length may change the prompt's keys: they are read twice
        whole = decoder.forward(params, cfg, joined, mask=real, mode=mode).hidden
        hidden, cache = decoder.extend(params, cfg, x, mask=mask, cache=cache, mode=mode)
        memory = cache, jnp.pad(x, ((0, 0), (0, size - length), (0, 0)))
        first = decoder.logits(params, hidden[:, -1:])[:, 0]
        return first, memory, decoder.logits(params, whole[:, length - 1 :])
    hidden, cache = decoder.extend(params, cfg, joined, mask=real, cache=cache, mode=mode)
    used = cache.used - behind
    cache = cache._replace(valid=cache.valid & (jnp.arange(size) < used)[None], used=used)
    logits = decoder.logits(params, hidden[:, length - 1 :])
    return logits[:, 0], cache, logits


def _outgrows(cfg: decoder.DecoderConfig, slots: int) -> bool:
    """Returns whether texts of so many slots may need the long frequencies of a LongRope model."""
    scaling = cfg.rope_scaling
    return isinstance(scaling, rotary.LongRope) and slots > scaling.original_max_positions


def follow(  # noqa: PLR0913
    params: Tree,
    cfg: decoder.DecoderConfig,
    mode: decoder.Mode,
    token: Int[Array, " b"],
    going: Bool[Array, " b"],
    memory: Tree,
) -> tuple[Float[Array, "b v"], Tree]:
    """Reads one more token of the rows that are `going`: the next logits and the memory behind it."""
    if not isinstance(memory, decoder.Cache):
        return _advance_or_reread(params, cfg, mode, token, going, memory)
    x = decoder.embed(params, token[:, None])
    hidden, cache = decoder.extend(params, cfg, x, mask=going[:, None], cache=memory, mode=mode)
    return decoder.logits(params, hidden)[:, 0], cache


def _advance_or_reread(
    params: Tree,
    cfg: decoder.DecoderConfig,
    mode: decoder.Mode,
    token: Int[Array, " b"],
    going: Bool[Array, " b"],
    carry: tuple[decoder.Cache, Float[Array, "b s d"]],
) -> tuple[jax.Array, Tree]:
    """Processes one more token, or the whole text again where a row outgrows the short frequencies.

    Frequencies are chosen for each row, so the other rows get the same values again. `carry` holds the cache and the
    embeddings of all its slots.
    """
    assert isinstance(cfg.rope_scaling, rotary.LongRope)
    cache, text = carry
    x, used = decoder.embed(params, token[:, None]), cache.used
    text = jax.lax.dynamic_update_slice_in_dim(text, x, used, axis=1)

    def reread() -> tuple[jax.Array, decoder.Cache]:
        valid = jax.lax.dynamic_update_slice_in_dim(cache.valid, going[:, None], used, axis=1)
        empty = cache._replace(valid=jnp.zeros_like(valid), used=jnp.zeros_like(used))
        hidden, read = decoder.extend(params, cfg, text, mask=valid, cache=empty, mode=mode)
        hidden = jax.lax.dynamic_slice_in_dim(hidden, used, 1, axis=1)
        return hidden, read._replace(used=used + 1)  # later slots hold no real token and are overwritten

    def advance() -> tuple[jax.Array, decoder.Cache]:
        return decoder.extend(params, cfg, x, mask=going[:, None], cache=cache, mode=mode)

    outgrown = going & (cache.valid.sum(axis=1, dtype=jnp.int32) == cfg.rope_scaling.original_max_positions)
    hidden, cache = jax.lax.cond(jnp.any(outgrown), reread, advance)
    return decoder.logits(params, hidden)[:, 0], (cache, text)


def generate_ttt(  # noqa: PLR0913  (as `generate`, and how to run)
    params: Tree,
    cfg: ttt.TTTConfig,
    ids: Int[Array, "b t"],
    *,
    lengths: Int[Array, " b"],
    sampling: Sampling,
    key: jax.Array,
    mode: ttt.Mode = ttt.Mode(),
) -> Int[Array, "b n"]:
    """Continues a TTT model's prompts, of each row the first `lengths` ids, at least one; see `sample`."""
    out = ttt.forward(params, cfg, ids, lengths=lengths, mode=mode)
    last = jnp.take_along_axis(out.hidden, lengths[:, None, None] - 1, axis=1)

    def advance(token: jax.Array, going: jax.Array, cache: ttt.Cache) -> tuple[jax.Array, Tree]:
        del going  # the states of finished rows are not used
        hidden, cache = ttt.decode(params, cfg, token, cache, mode=mode)
        return ttt.logits(params, cfg, hidden[:, None])[:, 0], cache

    return sample(ttt.logits(params, cfg, last)[:, 0], out.cache, advance, sampling=sampling, key=key)


def _choose(logits: Float[Array, "b v"], temperature: float, key: jax.Array) -> Int[Array, " b"]:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)
