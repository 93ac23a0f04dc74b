"""Which of a text's keys each head of a reader keeps, and what values and biases they get: KVzip (arXiv 2505.23416),
shares of the positions by layer and head, attention matching (arXiv 2602.16284).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.models import decoder, kv_prefix, projections
from lw_jax.models.alignment import EXACTLY
from lw_jax.models.attention import LEAST
from lw_jax.models.attention_matching import TINY, by_head, solve_ridge
from lw_jax.models.decoder import DecoderConfig, KVPrefix, Mode, SharedPrefix
from lw_jax.models.kv_prefix import Sizes
from lw_jax.models.products import from_bits, multiply

BLOCK = 256  # queries whose attention is in memory at a time
RIDGE = 3e-2  # x the mean square of the kept keys' shares: pulls towards the values as they were
PULL = 1e-2  # the same of the weights towards 1, a bias of 0
LONGEST = 3.0  # x a text's longest value: a head whose fitted ones are longer has exact ones; nearly all have 2
STEPS = 200  # of the weights' projected gradient
LEAST_KEYS = 64  # of a loop over heads that keep alike many
WEIGHTS = (0.05, 100.0)
_LOUDEST = 20.0  # log of a decoded key's share beside an exact one's whole: its square must be a number
_FAINTEST = 1e-6  # share of the whole text: below it a query says nothing about the text's keys
_POWERS = 64  # steps of the power method: a matrix without negative entries needs few


class Queries(NamedTuple):
    """What the repeated text asks with, of all layers."""

    q: Float[Array, "l b t h e"]  # turned
    total: Float[Array, "l b t h"]  # log of the sum of the exponentiated scores of all keys that a query sees


class Reading(NamedTuple):
    """A text read twice."""

    text: KVPrefix
    scores: Float[Array, "l b t k"]  # the largest effect that a key and its value have on a repeating query
    power: Float[Array, "l b t k"]  # the squared shares, summed over all queries
    seen: Int[Array, "1 1"]  # tokens before the text
    queries: Queries | None


def read_twice(  # noqa: PLR0913  (as `decoder.forward`)
    params: Tree,
    cfg: DecoderConfig,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"],
    again: SharedPrefix,
    shared_prefix: SharedPrefix | None = None,
    keep_queries: bool = False,
    mode: Mode = Mode(),
) -> Reading:
    """Returns a text's keys and values behind a shared prefix, and what each is worth when the text is repeated.

    `again` asks, behind the text, for its repetition. Both are read in pieces of at most `BLOCK` tokens.

    Raises:
        UserError: for a reader whose attention does not reach from the end of the repetition to the text's beginning.
    """
    rows, length, _ = x.shape
    start, ask_length = 0 if shared_prefix is None else shared_prefix.x.shape[1], again.x.shape[1]
    pieces = _pieces(x), _pieces(mask)
    # The request and the repetition are one text, as each piece reads all weights; the repetition alone asks for keys.
    request = decoder.repeat(again.mask, rows)
    repetition = tuple(
        _pieces(jnp.concatenate(pair, axis=1))
        for pair in ((decoder.repeat(again.x, rows), x), (request, mask), (jnp.zeros_like(request), mask))
    )
    size = start + sum(parts[1].shape[0] * parts[1].shape[2] for parts in (pieces, repetition))
    if cfg.window and (positions := start + 2 * length + ask_length) > cfg.window:
        raise UserError(
            f"config.encoder.kind='cache': a text is read twice, {positions:,} positions, the reader attends to "
            f"{cfg.window:,}; shorten the text (config.data.context_tokens), or choose another reader"
        )

    def read(cache: decoder.Cache, piece: tuple[jax.Array, jax.Array]) -> tuple[decoder.Cache, None]:
        return decoder.extend(params, cfg, piece[0], mask=piece[1], cache=cache, mode=mode)[1], None

    cache = kv_prefix.read_once(params, cfg, (rows, size), shared_prefix, x.dtype, mode)
    cache, _ = jax.lax.scan(read, cache, pieces)
    text = kv_prefix.of_cache(cfg, cache, mask=mask, start=start)

    def repeat(carry: tuple, piece: tuple[jax.Array, ...]) -> tuple[tuple, tuple | None]:
        cache, best, power = carry
        x, mask, asks = piece
        visit = functools.partial(_pay, slice(start, start + length), asks, mode.factors)
        (pay, *queries), cache = decoder.visit_attention(params, cfg, x, mask=mask, visit=visit, cache=cache, mode=mode)
        carry = (cache, jnp.maximum(best, pay[0]), power + pay[1])
        return carry, tuple(queries) if keep_queries else None

    none = jnp.zeros((cfg.layers, rows, length, cfg.kv_heads))
    (_, best, power), queries = jax.lax.scan(repeat, (cache, none, none), repetition)
    best = best * _output_norms(params, cfg, text.v)
    seen = jnp.zeros((1, 1), jnp.int32)
    if shared_prefix is not None:
        seen = shared_prefix.mask.sum(axis=1, keepdims=True, dtype=jnp.int32)
    if queries is None:
        return Reading(text, best, power, seen, None)
    # [n l b block ...] -> [l b t ...]
    whole = (jnp.moveaxis(leaf, 0, 2).reshape(*leaf.shape[1:3], -1, *leaf.shape[4:]) for leaf in queries)
    whole = (leaf[:, :, ask_length : ask_length + length] for leaf in whole)
    return Reading(text, best, power, seen, Queries(*whole))


def _pay(
    slots: slice, asks: Bool[Array, "b q"], factors: str | None, layer: decoder.Attended
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """Returns of each key of a text [b t k] the largest share of attention, each query's divided by the size of its
    residual stream behind the layer, and the sum of the squared shares; the queries and their totals [b q h].
    """
    q, k, _, attend, out = layer
    scores = multiply("bkgqe,bske->bkgqs", by_head(q, k.shape[2]), k, factors=factors or q.dtype) * q.shape[-1] ** -0.5
    scores = jnp.where(attend[:, :, None], scores, LEAST)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    shares = jnp.where(asks[:, None, None, :, None], jnp.exp(scores[..., slots] - total), 0.0)
    size = jnp.linalg.norm(out.astype(jnp.float32), axis=-1)[:, None, None, :, None]
    largest = (shares / jnp.maximum(size, TINY)).max(axis=(2, 3))
    paid = largest.swapaxes(1, 2), jnp.square(shares).sum(axis=(2, 3)).swapaxes(1, 2)
    return paid, q, total.transpose(0, 3, 1, 2, 4).reshape(q.shape[:3])


@EXACTLY
def _output_norms(params: Tree, cfg: DecoderConfig, v: Float[Array, "l b t k e"]) -> Float[Array, "l b t k"]:
    """Returns how large the output projection makes each value: the root mean square over the heads of its group.

    Times a share of attention, beside the residual stream, it is what a key adds to a query: KVzip+ (arXiv 2601.07891),
    which takes the stream before the layer. Before the first layer it is small, and nearly all of its keys were kept.
    """

    def layer(inputs: tuple[Tree, jax.Array]) -> jax.Array:
        weights, v = inputs
        matrix = projections.output_matrix(from_bits(weights), (cfg.heads, cfg.head_dim), jnp.float32)
        matrix = matrix.reshape(len(matrix), cfg.kv_heads, -1, cfg.head_dim)
        gram = jnp.einsum("dkge,dkgf->kef", matrix, matrix) / matrix.shape[2]
        squares = jnp.einsum("btke,kef,btkf->btk", v.astype(jnp.float32), gram, v.astype(jnp.float32))
        return jnp.sqrt(jnp.maximum(squares, 0.0))

    return jax.lax.map(layer, (params["layers"], v))


def table_of(scores: Float[np.ndarray, "n l k"], share: float) -> Float[np.ndarray, "l k"]:
    """Returns each head's share of the positions, so that `share` of all (token, layer, head) are kept.

    One threshold over the scores of all texts' real tokens: of 60,000 tokens of an 8B reader 63 MB.
    """
    count = max(int(share * scores.size), 1)
    least = np.partition(scores, scores.size - count, axis=None)[scores.size - count]
    return (scores >= least).mean(axis=0)


def count_kept(table: Float[np.ndarray, "l k"], lengths: Int[np.ndarray, " b"]) -> Int[np.ndarray, "l b k"]:
    """Returns how many positions of texts of these lengths each head keeps; in fp64, alike wherever it is computed."""
    return np.rint(table.astype(np.float64)[:, None] * lengths[None, :, None]).astype(np.int32)


def choose(
    scores: Float[Array, "l b t k"], mask: Bool[Array, "b t"], count: Int[Array, "l b k"]
) -> Bool[Array, "l b t k"]:
    """Returns the keys that each head keeps: the `count` best, of `count_kept`. One order serves all counts."""
    real = mask[None, :, :, None]
    order = jnp.argsort(jnp.where(real, -scores, jnp.inf), axis=2)
    rank = jnp.argsort(order, axis=2).astype(jnp.int32)
    return (rank < count[:, :, None]) & real


def fit(  # noqa: PLR0913
    cfg: DecoderConfig,
    queries: Queries,
    text: KVPrefix,
    kept: Bool[Array, "l b t k"],
    *,
    seen: Int[Array, "b 1"] | Int[Array, "1 1"] | int,
    sizes: Sizes,
    sent: tuple[Float[Array, "l b t k e"], Float[Array, "l b t k e"]] | None = None,
) -> tuple[Float[Array, "l b t k e"], Float[Array, "l b t k"]]:
    """Returns values and biases with which the kept keys give what the whole text gave to the repeating queries.

    What is not kept is 0. Heads that keep alike many keys are fitted by one loop, without the keys that they leave out:
    `sizes` are at least as many as a head keeps in any row. `seen` tokens stand before the text.

    `sent`: keys, not turned, and values as the reader will have them. Then the biases are fitted to these keys, the
    values to both, around those sent.
    """
    (keys, values), group = sent or (text.k, text.v), queries.q.shape[3] // kept.shape[3]
    turned = decoder.rotate_keys(cfg, text, seen=seen)
    heard = turned if sent is None else decoder.rotate_keys(cfg, text._replace(k=keys), seen=seen)

    def head(most: int, layer: jax.Array, kv_head: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, total = (
            jax.lax.dynamic_slice_in_dim(x[layer], kv_head * group, group, axis=2) for x in (queries.q, queries.total)
        )
        chosen = kept[layer, :, :, kv_head]
        places = jnp.argsort(~chosen, axis=1)[:, :most]  # stable: the kept ones in their order
        real = jnp.take_along_axis(chosen, places, axis=1)
        k, v, all_k, all_v = (x[layer, :, :, kv_head] for x in (heard, values, turned, text.v))
        k, v = (jnp.take_along_axis(x, places[..., None], axis=1) for x in (k, v))
        return places, *_fit_head(q, total, all_k, all_v, k, v, real, mask=text.mask)

    def heads(most: int, fitted: tuple[jax.Array, jax.Array], numbers: jax.Array) -> tuple[tuple, None]:
        layer, kv_head = numbers[:, 0, None, None], numbers[:, 1, None, None]
        places, *updates = jax.vmap(functools.partial(head, most))(*numbers.T)
        index = layer, jnp.arange(places.shape[1], dtype=jnp.int32)[None, :, None], places, kv_head
        return tuple(old.at[index].set(new.astype(old.dtype)) for old, new in zip(fitted, updates, strict=True)), None

    fitted = jnp.zeros(values.shape, values.dtype), jnp.zeros(kept.shape)
    for most, numbers in _alike(sizes, kept.shape[2]).items():
        # One after the other: on a CPU loops that run at once wait for threads that the others' factorisations hold.
        fitted, _ = jax.lax.scan(functools.partial(heads, most), fitted, _batches(numbers, cfg.kv_heads))
    return fitted


def _batches(numbers: list[tuple[int, int]], count: int) -> Int[Array, "n k 2"]:
    """Returns the numbers in batches of so many, the last one filled up with its last."""
    filled = numbers + numbers[-1:] * (-len(numbers) % count)
    return jnp.asarray(np.array(filled, np.int32).reshape(-1, count, 2))


def _alike(sizes: Sizes, length: int) -> dict[int, list[tuple[int, int]]]:
    """Returns (layer, head) by the least of length, length / 2, length / 4 ... that holds the keys of the head."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for layer, row in enumerate(sizes):
        for head, size in enumerate(row):
            most = length
            while most > LEAST_KEYS and -(-most // 2) >= size:
                most = -(-most // 2)
            groups.setdefault(most, []).append((layer, head))
    return groups


@EXACTLY
def _fit_head(  # noqa: PLR0913
    q: Float[Array, "b t g e"],
    total: Float[Array, "b t g"],
    keys: Float[Array, "b t e"],
    values: Float[Array, "b t e"],
    keys_sent: Float[Array, "b m e"],
    values_sent: Float[Array, "b m e"],
    kept: Bool[Array, "b m"],
    *,
    mask: Bool[Array, "b t"],
) -> tuple[Float[Array, "b m e"], Float[Array, "b m"]]:
    """Returns the values and biases of one head's kept keys; keys are turned. See `fit`."""
    keys, values, keys_sent, around = (x.astype(jnp.float32) for x in (keys, values, keys_sent, values_sent))
    queries = q.astype(jnp.float32) * q.shape[-1] ** -0.5
    pieces = tuple(_pieces(x) for x in (queries, total, mask))

    def shares(piece: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries' shares of attention to the text, their sum, and those of the kept keys as sent."""
        queries, total, asks = piece[0], piece[1].swapaxes(1, 2)[..., None], piece[2][:, None, :, None]
        exact, as_sent = (jnp.einsum("bqge,bte->bgqt", queries, x) - total for x in (keys, keys_sent))
        exact = jnp.where(asks & mask[:, None, None], jnp.exp(exact), 0.0)
        as_sent = jnp.where(asks & kept[:, None, None], jnp.exp(jnp.minimum(as_sent, _LOUDEST)), 0.0)
        return exact, exact.sum(axis=-1, keepdims=True), as_sent

    def of_mass(piece: tuple) -> tuple[jax.Array, jax.Array]:
        _, mass, as_sent = shares(piece)
        relative = as_sent / jnp.maximum(mass, _FAINTEST)
        return jnp.einsum("bgqm,bgqn->bmn", relative, relative), relative.sum(axis=(1, 2))

    def of_outputs(piece: tuple, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        exact, mass, as_sent = shares(piece)
        as_sent = as_sent * weight[:, None, None]
        as_sent = as_sent / jnp.maximum(as_sent.sum(axis=-1, keepdims=True) + 1.0 - mass, _FAINTEST)
        missing = jnp.einsum("bgqt,bte->bgqe", exact, values) - jnp.einsum("bgqm,bme->bgqe", as_sent, around)
        return jnp.einsum("bgqm,bgqn->bmn", as_sent, as_sent), jnp.einsum("bgqm,bgqe->bme", as_sent, missing)

    count = kept.sum(axis=1, dtype=jnp.int32)
    gram, right = _sum(of_mass, pieces)
    weight = _weigh(gram, right, count)
    gram, right = _sum(lambda piece: of_outputs(piece, weight), pieces)
    change = solve_ridge(gram[:, None], right[:, None], count[:, None], RIDGE)[:, 0]
    # Where no query pays to what is kept, a fit has values of any length: one head of one text of twenty had 160 x.
    longest = jnp.linalg.norm(jnp.where(mask[..., None], values, 0.0), axis=2).max(axis=1)
    fitted = jnp.where(kept[..., None], around + change, 0.0)
    steady = jnp.linalg.norm(fitted, axis=2).max(axis=1) <= LONGEST * longest
    fitted = jnp.where(kept[..., None] & ~steady[:, None, None], around, fitted).astype(values_sent.dtype)
    return fitted, jnp.where(kept, jnp.log(weight), 0.0)


def _weigh(gram: Float[Array, "b m m"], right: Float[Array, "b m"], count: Int[Array, " b"]) -> Float[Array, "b m"]:
    """Returns factors of the kept keys' shares with which they sum to the text's: nonnegative least squares."""
    pull = PULL * jnp.trace(gram, axis1=1, axis2=2)[:, None] / jnp.maximum(count, 1).astype(jnp.float32)[:, None]

    def apply(vector: jax.Array) -> jax.Array:
        return jnp.einsum("bmn,bn->bm", gram, vector) + pull * vector

    def power(_: jax.Array, vector: jax.Array) -> jax.Array:
        vector = apply(vector)
        return vector / jnp.maximum(jnp.linalg.norm(vector, axis=1, keepdims=True), TINY)

    first = jax.lax.fori_loop(0, _POWERS, power, jnp.ones_like(right))
    step = 1.0 / jnp.maximum((first * apply(first)).sum(axis=1, keepdims=True), TINY)

    def descend(_: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.clip(weight - step * (apply(weight) - right - pull), *WEIGHTS)

    return jax.lax.fori_loop(0, STEPS, descend, jnp.ones_like(right))


def _pieces(x: Shaped[Array, "b t ..."]) -> Shaped[Array, "n b q ..."]:
    """Returns the positions in pieces of at most `BLOCK`, all alike, the last one filled up with zeros."""
    length = x.shape[1]
    count = -(-length // BLOCK)
    block = -(-length // count)
    x = jnp.pad(x, [(0, 0), (0, count * block - length), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(len(x), count, block, *x.shape[2:]), 1, 0)


def _sum(terms: Callable[[tuple], tuple], pieces: tuple) -> tuple:
    """Returns the sum of the terms of all pieces, one piece's in memory at a time."""
    shapes = jax.eval_shape(terms, jax.tree.map(lambda leaf: leaf[0], pieces))
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(lambda total, piece: (jax.tree.map(jnp.add, total, terms(piece)), None), empty, pieces)[0]
