"""Cached generation inside one jitted loop, greedy or sampled."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.types import Tree
from lw_jax.models import decoder


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Static facts of a generation. Temperature 0 is greedy."""

    max_new_tokens: int
    stops: tuple[int, ...]  # ids that end a row; the stop itself is not part of the answer
    temperature: float = 0.0


class _Loop(NamedTuple):
    step: jax.Array
    ids: jax.Array
    done: jax.Array
    logits: jax.Array
    cache: decoder.Cache | None


def generate(
    params: Tree,
    cfg: decoder.DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    sampling: Sampling,
    key: jax.Array,
) -> Int[Array, "b n"]:
    """Continues prompt embeddings and returns new ids [b, max_new_tokens]; -1 after a row's stop.

    The last column of x must be a real token of every row (left-padded prompts). The loop ends early when all rows
    have stopped.
    """
    batch = x.shape[0]
    cache = decoder.empty_cache(cfg, batch, x.shape[1] + sampling.max_new_tokens, x.dtype)
    out = decoder.forward(params, cfg, x, mask=mask, cache=cache)
    stops = jnp.asarray(sampling.stops, jnp.int32)

    def unfinished(state: _Loop) -> jax.Array:
        return (state.step < sampling.max_new_tokens) & ~jnp.all(state.done)

    def advance(state: _Loop) -> _Loop:
        token = _choose(state.logits, sampling.temperature, jax.random.fold_in(key, state.step))
        done = state.done | jnp.any(token[:, None] == stops[None, :], axis=1)
        ids = state.ids.at[:, state.step].set(jnp.where(done, -1, token))
        step = decoder.forward(
            params, cfg, decoder.embed(params, token[:, None]), mask=~done[:, None], cache=state.cache
        )
        return _Loop(state.step + 1, ids, done, decoder.logits(params, step.hidden)[:, 0], step.cache)

    first = decoder.logits(params, out.hidden[:, -1:])[:, 0]
    ids = jnp.full((batch, sampling.max_new_tokens), -1, jnp.int32)
    state = _Loop(jnp.zeros((), jnp.int32), ids, jnp.zeros((batch,), bool), first, out.cache)
    return jax.lax.while_loop(unfinished, advance, state).ids


def _choose(logits: Float[Array, "b v"], temperature: float, key: jax.Array) -> Int[Array, " b"]:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)
