"""A text's keys and values reduced to fewer: attention matching (arXiv 2602.16284), without the bias of a key.

What is kept could be a message: keys and values of every layer at consecutive positions behind the shared prefix.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.models import decoder, rotary
from lw_jax.models.alignment import EXACTLY
from lw_jax.models.attention import LEAST
from lw_jax.models.decoder import DecoderConfig, KVPrefix, Mode

RIDGE = 1e-2  # x the mean square of the kept keys' shares of attention: pulls towards the values as they were
TINY = 1e-30


class Text(NamedTuple):
    """Embeddings to read: a shared prefix and a text, and behind them what asks for the text's keys."""

    x: Float[Array, "b t d"]
    mask: Bool[Array, "b t"]
    before: Bool[Array, "b t"]  # the shared prefix
    context: Bool[Array, "b t"]  # the text
    asks: Bool[Array, "b q"]  # the last positions, where the queries count


def join(
    params: Tree, context: Mapping[str, jax.Array], probe: Mapping[str, jax.Array], *, before: Int[Array, "b 1"]
) -> Text:
    """Returns the text, a question about another one, and the text again: for its own questions, which come later.

    `context` has {"ids", "mask"} of the shared prefix, `before` tokens, and the text; `probe` those of the question.
    """
    is_text = context["mask"] & (jnp.cumsum(context["mask"], axis=1, dtype=jnp.int32) > before)
    ids = jnp.concatenate([context["ids"], probe["ids"], context["ids"]], axis=1)
    asks = jnp.concatenate([probe["mask"], is_text], axis=1)
    none = jnp.zeros_like(asks)
    return Text(
        decoder.embed(params, ids),
        jnp.concatenate([context["mask"], asks], axis=1),
        jnp.concatenate([context["mask"] & ~is_text, none], axis=1),
        jnp.concatenate([is_text, none], axis=1),
        asks,
    )


def compact(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: DecoderConfig,
    text: Text,
    slots: Bool[Array, "b m"],
    *,
    mode: Mode = Mode(),
) -> KVPrefix:
    """Returns keys and values of the text for `slots`, the first of them where the text has fewer tokens.

    In each layer and head those keys are kept that have the largest root mean square of attention. They keep their
    distance to what follows. Their values are fitted: the attention outputs of the asking queries are nearest to
    those over the whole text.

    Raises:
        UserError: for a LongRope reader, where the joined text passes the length of its short frequencies.
    """
    scaling, length = cfg.rope_scaling, text.x.shape[1]
    if isinstance(scaling, rotary.LongRope) and length > scaling.original_max_positions:
        raise UserError(
            f"config.eval.rows: 'ceiling' reads a text twice, {length} positions, a LongRope reader at most "
            f"{scaling.original_max_positions}; leave the row out or shorten config.data.context_tokens"
        )
    slots = slots[:, : length - text.asks.shape[1]]
    tokens = text.context.sum(axis=1, keepdims=True, dtype=jnp.int32)
    kept = slots & (jnp.cumsum(slots, axis=1, dtype=jnp.int32) <= tokens)
    visit = functools.partial(_match, cfg, text, kept)
    (keys, values), _ = decoder.visit_attention(params, cfg, text.x, mask=text.mask, visit=visit, mode=mode)
    return KVPrefix(keys, values, kept)


@EXACTLY
def _match(  # noqa: PLR0913
    cfg: DecoderConfig,
    text: Text,
    kept: Bool[Array, "b m"],
    layer: decoder.Attended,
) -> tuple[jax.Array, jax.Array]:
    """Returns one layer's kept keys, not turned, and their values [b m k e]."""
    q, k, v, attend, _ = layer
    keys, values = (x.astype(jnp.float32).swapaxes(1, 2) for x in (k, v))  # [b k t e]
    asking = text.asks.shape[1]
    queries = by_head(q[:, -asking:].astype(jnp.float32), k.shape[2]) * cfg.head_dim**-0.5  # [b k g q e]
    seen = attend[:, :, None, -asking:]
    scores = jnp.where(seen, _scores(queries, keys), LEAST)
    # As the reader will see it: the text's other tokens are gone, so the shared prefix is so much nearer.
    gone = (text.context.sum(axis=1, dtype=jnp.int32) - kept.sum(axis=1, dtype=jnp.int32))[:, None]
    near = jnp.where(text.before[:, None, None, None], _scores(queries, _turn(cfg, keys, gone)), scores)
    top = jnp.maximum(scores, near).max(axis=-1, keepdims=True)
    whole = jnp.where(seen, jnp.exp(scores - top), 0.0)
    counts = text.asks[:, None, None, :, None].astype(jnp.float32)
    share = counts * whole / jnp.maximum(whole.sum(axis=-1, keepdims=True), TINY)
    out = jnp.einsum("bkgqt,bkte->bkgqe", share, values)

    importance = jnp.where(text.context[:, None], jnp.square(share).sum(axis=(2, 3)), -jnp.inf)
    chosen = jax.lax.top_k(importance, kept.shape[1])[1]  # [b k m]
    keys_kept, values_kept = (jnp.take_along_axis(x, chosen[..., None], axis=2) for x in (keys, values))
    p_kept = jnp.take_along_axis(whole, chosen[:, :, None, None], axis=-1)
    p_kept = jnp.where(kept[:, None, None, None], p_kept, 0.0)

    p_near = jnp.where(seen & ~text.context[:, None, None, None], jnp.exp(near - top), 0.0)
    scale = counts / jnp.maximum(p_near.sum(axis=-1, keepdims=True) + p_kept.sum(axis=-1, keepdims=True), TINY)
    p_kept, p_near = p_kept * scale, p_near * scale
    error = out - jnp.einsum("bkgqt,bkte->bkgqe", p_near, values) - jnp.einsum("bkgqm,bkme->bkgqe", p_kept, values_kept)
    gram = jnp.einsum("bkgqm,bkgqn->bkmn", p_kept, p_kept)
    right = jnp.einsum("bkgqm,bkgqe->bkme", p_kept, error)
    values_kept = values_kept + solve_ridge(gram, right, kept.sum(axis=1)[:, None], RIDGE)

    # A slot's position turns a key: turned back by as much, it stands where it stood, seen from what follows.
    slot = text.before.sum(axis=1, keepdims=True, dtype=jnp.int32) + jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    keys_kept = _turn(cfg, keys_kept, -(slot + gone), stored=True)
    shown = kept[:, :, None, None]
    keys_kept, values_kept = (jnp.where(shown, x.swapaxes(1, 2), 0.0).astype(k.dtype) for x in (keys_kept, values_kept))
    return keys_kept, values_kept


def solve_ridge(
    gram: Float[Array, "b k m m"],
    right: Float[Array, "b k m e"],
    count: Int[Array, "b k"] | Int[Array, "b 1"],
    ridge: float,
) -> Float[Array, "b k m e"]:
    """Solves by least squares with a ridge of `ridge` x the mean of the diagonal's `count` entries that are not 0."""
    size = jnp.trace(gram, axis1=2, axis2=3) / jnp.maximum(count, 1).astype(jnp.float32)
    gram = gram + (ridge * size + TINY)[..., None, None] * jnp.eye(gram.shape[-1])[None, None]
    # Not `solve`: on several virtual devices of a CPU each one's batched LU waits for threads that the others hold.
    return cho_solve(cho_factor(gram, lower=True), right)


def _scores(queries: Float[Array, "b k g q e"], keys: Float[Array, "b k t e"]) -> Float[Array, "b k g q t"]:
    return jnp.einsum("bkgqe,bkte->bkgqt", queries, keys)


def by_head(q: Float[Array, "b q h e"], heads: int) -> Float[Array, "b k g q e"]:
    """Returns queries by the head of keys that they attend to."""
    rows, count, _, width = q.shape
    return q.reshape(rows, count, heads, -1, width).transpose(0, 2, 3, 1, 4)


def _turn(
    cfg: DecoderConfig,
    keys: Float[Array, "b k t e"],
    by: Int[Array, "b t"] | Int[Array, "b 1"],
    *,
    stored: bool = False,
) -> Float[Array, "b k t e"]:
    """Returns turned keys, turned on by so many positions; `stored`: as they are before they are turned."""
    cos, sin = decoder.angles(cfg, jnp.abs(by))
    gain = cfg.rope_scaling.gain if isinstance(cfg.rope_scaling, rotary.LongRope) else 1.0
    gain = gain * gain if stored else gain  # that of the new turn, and that of the old one
    sign = jnp.sign(by)[:, :, None, None].astype(jnp.float32)
    return rotary.rotate(keys.swapaxes(1, 2), cos / gain, sign * sin / gain).swapaxes(1, 2)
