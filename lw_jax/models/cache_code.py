"""One basis for a token's keys and values of all layers: a reader's cache in few numbers (KVTC, 2511.01815)."""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from lw_jax.models.decoder import KVPrefix
from lw_jax.models.products import multiply

MORE = 64  # directions that the range finder follows beyond those that are wanted
LEAST_WEIGHT = 1e-3  # x the largest: what weighs nothing is still read as its mean, without a division by 0
IMPORTANCE = (0.02, 8.0)  # x a layer's mean: least and largest
SWEEPS = 4  # of `solve` over a token's numbers: 8 leave 2 % less of the weighted error, in as many bytes
LAPLACIAN = 0.7  # x its deviation: mean size of a number
PRICE = 1.2  # of a nat, x the error that one more of large numbers would save
BLOCK = 64  # of a token's numbers: `solve` takes them in turn before the error of all states is computed anew
# Of the states that `solve` has of some tokens at a time: a card's steps are short and many.
_PIECE_BYTES = {"cpu": 2**25, "default": 2**31}
_FARTHEST = 2.0**30  # steps: a first guess may be far too small


class Code(NamedTuple):
    """A token's states y = mean + scale * (z basis): y are keys, not turned, and values of all layers."""

    mean: Float[Array, "2 l k e"]
    scale: Float[Array, "2 l"]
    basis: Float[Array, "w n"]  # orthonormal rows, the first explain most; n = 2 l k e


# Batches of (states [r n], which of them are real tokens); called once a sweep, so that nobody holds them all.
Chunks = Callable[[], Iterable[tuple[Float[Array, "r n"], Bool[Array, " r"]]]]


def states(k: Float[Array, "l b t k e"], v: Float[Array, "l b t k e"]) -> Float[Array, "b t n"]:
    """Returns keys and values as one vector a token, in fp32."""
    both = jnp.stack([k, v]).transpose(2, 3, 0, 1, 4, 5)
    return both.reshape(*both.shape[:2], -1).astype(jnp.float32)


def write(code: Code, kv: KVPrefix) -> Float[Array, "b t w"]:
    """Returns a text's numbers, of each token the most telling first."""
    y = states(kv.k, kv.v) - code.mean.reshape(1, 1, -1)
    with jax.default_matmul_precision("highest"):
        return jnp.einsum("btn,wn->btw", y / _by_value(code.scale, code.mean)[None, None], code.basis)


def importance(
    power: Float[Array, "l b t k"], kept: Bool[Array, "l b t k"], mask: Bool[Array, "b t"], root: float
) -> Float[Array, "l b t k"]:
    """Returns the weights of `solve`, the largest 1, from the squared attention to what is kept of a text."""
    least, most = IMPORTANCE
    power = jnp.where(kept, power, 0.0)
    count = jnp.maximum(mask.sum(axis=1, dtype=jnp.int32), 1) * power.shape[3]
    mean = power.sum(axis=(2, 3), keepdims=True) / count.astype(jnp.float32)[None, :, None, None]
    return jnp.clip((power / jnp.maximum(mean, 1e-9)) ** root / most, least / most, 1.0)


def solve(  # noqa: PLR0913
    code: Code,
    kv: KVPrefix,
    weights: Float[Array, "l b t k"],
    *,
    step: Float[Array, " b"],
    variance: Float[Array, " w"],
    sweeps: int = SWEEPS,
    factors: str | None = None,
) -> Int[Array, "b t w"]:
    """Returns a text's numbers, whole ones of steps of `step`: near where the reader looks, and short to send.

    Of each token they lessen sum(W (x - m step basis)^2) / 2 + price nats(m), x its states in the code's units, by
    coordinate descent: each number in turn is 0 or the whole number that serves best beside all others. Rounding alone
    costs a quarter more bytes for as little weighted error (docs/experiments.md).

    Args:
        code: of the reader.
        kv: a text's keys and values as they are to arrive.
        weights: of each layer's and head's key and value, `importance`.
        step: between two numbers that a message can say.
        variance: of the numbers, over many texts: nats are those of a Laplacian distribution.
        sweeps: over all numbers.
        factors: dtype of the factors of its products; None: as they are.
    """
    factors = factors or jnp.dtype(jnp.float32).name
    x = (states(kv.k, kv.v) - code.mean.reshape(1, 1, -1)) / _by_value(code.scale, code.mean)[None, None]
    steps = jnp.broadcast_to(step[:, None, None], (*x.shape[:2], 1))
    weights = jnp.moveaxis(weights, 0, 2)
    count = jnp.maximum(kv.mask.sum(axis=1, dtype=jnp.int32), 1).astype(jnp.float32)
    mean = jnp.where(kv.mask, weights.mean(axis=(2, 3)), 0.0).sum(axis=1) / count
    price = jnp.broadcast_to((PRICE / 12 * mean)[:, None, None], steps.shape)
    tokens = (x / steps, weights.reshape(*x.shape[:2], -1), steps, price)
    rate = 1.0 / (LAPLACIAN * jnp.sqrt(jnp.maximum(variance, jnp.finfo(jnp.float32).tiny)))
    piece = functools.partial(_solve_piece, code, rate, sweeps=sweeps, factors=factors)
    ways = {
        platform: functools.partial(_map_pieces, piece, max(1, size // (4 * x.shape[2])))
        for platform, size in _PIECE_BYTES.items()
    }
    numbers = jax.lax.platform_dependent(tuple(leaf.reshape(-1, leaf.shape[2]) for leaf in tokens), **ways)
    return numbers.reshape(*x.shape[:2], -1).astype(jnp.int32)


def _solve_piece(  # noqa: PLR0913
    code: Code,
    rate: Float[Array, " w"],
    tokens: tuple[Float[Array, "t n"], Float[Array, "t g"], Float[Array, "t 1"], Float[Array, "t 1"]],
    *,
    sweeps: int,
    factors: str,
) -> Float[Array, "t w"]:
    """Returns the numbers of some tokens: their states in steps, weights by head, steps and prices.

    Numbers of a block are taken in turn beside products of their own directions; what is left of the states says to
    the next block what they became. So no token needs the products of all directions.
    """
    x, weights, step, price = tokens
    width, size = len(code.basis), min(BLOCK, len(code.basis))
    count, short = -(-width // size), -width % size
    blocks = jnp.pad(code.basis, ((0, short), (0, 0))).reshape(count, size, -1)
    rates = jnp.pad(rate, (0, short), constant_values=1.0).reshape(count, size)
    by_head = _by_head(blocks, code.mean.shape)
    by_state = _by_state(weights.reshape(1, len(x), *code.mean.shape[1:3]), code.mean.shape)[0]

    def improve(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        numbers, rest = carry
        at = turn % count
        before, rows = numbers[at], blocks[at]
        pull = multiply("tn,cn->tc", by_state * rest, rows, factors=factors)
        gram = jnp.einsum("tg,gcd->tcd", weights, products[at])
        after = jax.vmap(_descend)(gram, before, pull, rates[at][None] * step, price)
        rest = rest - multiply("tc,cn->tn", after - before, rows, factors=factors)
        return jax.lax.dynamic_update_index_in_dim(numbers, after, at, 0), rest

    with jax.default_matmul_precision("highest"):
        products = multiply("jgcx,jgdx->jgcd", by_head, by_head, factors=factors)
        # x alone is what it would be for weights of 1: a start.
        first = jnp.clip(jnp.rint(jnp.einsum("tn,jcn->jtc", x, blocks)), -_FARTHEST, _FARTHEST)
        rest = x - jnp.einsum("jtc,jcn->tn", first, blocks)
        numbers, _ = jax.lax.fori_loop(0, sweeps * count, improve, (first, rest))
    return jnp.moveaxis(numbers, 0, 1).reshape(len(x), -1)[:, :width]


def _descend(
    gram: Float[Array, "c c"],
    numbers: Float[Array, " c"],
    slope: Float[Array, " c"],
    rate: Float[Array, " c"],
    price: Float[Array, " 1"],
) -> Float[Array, " c"]:
    """Returns whole numbers m that lessen (m - numbers) gram (m - numbers) / 2 - (m - numbers) slope + price nats(m).

    Each in turn takes its best value. Rounded, a Laplacian number whose mean size is 1 / rate takes rate |m| - rate / 2
    + log(2 / (1 + exp(-rate / 2))) nats more than 0.
    """
    diagonal = jnp.maximum(jnp.diagonal(gram), jnp.finfo(jnp.float32).tiny)  # of what fills a block it is 0
    cost, least = price / diagonal, jnp.log(2 / (1 + jnp.exp(-rate / 2))) - rate / 2

    def place(at: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        numbers, slope = carry
        best = numbers[at] + slope[at] / diagonal[at]  # without a price
        size = jnp.abs(best)
        near = jnp.clip(jnp.rint(size - cost[at] * rate[at]), 1.0, _FARTHEST)
        gain = size * near - near**2 / 2 - cost[at] * (near * rate[at] + least[at])  # over 0
        new = jnp.where(gain > 0, jnp.sign(best) * near, 0.0)
        slope = slope - (new - numbers[at]) * gram[at]
        return jax.lax.dynamic_update_index_in_dim(numbers, new, at, 0), slope

    return jax.lax.fori_loop(0, len(numbers), place, (numbers, slope))[0]


def _by_head(blocks: Float[Array, "j c n"], shape: tuple[int, ...]) -> Float[Array, "j g c x"]:
    """Returns blocks of the basis by what has a weight of its own: a layer's head, its key and value together."""
    count, size, _ = blocks.shape
    by_value = blocks.reshape(count, size, *shape).transpose(0, 3, 4, 1, 2, 5)
    return by_value.reshape(count, -1, size, 2 * shape[3])


def _map_pieces(
    function: Callable[[tuple], jax.Array], most: int, tokens: tuple[Float[Array, "n _"], ...]
) -> jax.Array:
    """Returns a function of tokens, of `most` at a time: `jax.lax.map` has a second program for what is left."""
    count = len(tokens[0])
    pieces = -(-count // most)
    size = -(-count // pieces)
    padded = (jnp.pad(leaf, ((0, pieces * size - count), (0, 0)), mode="edge") for leaf in tokens)
    values = jax.lax.map(function, tuple(leaf.reshape(pieces, size, -1) for leaf in padded))
    return values.reshape(pieces * size, -1)[:count]


def read(code: Code, z: Float[Array, "b t w"]) -> tuple[Float[Array, "l b t k e"], Float[Array, "l b t k e"]]:
    """Returns keys, not turned, and values of all layers from all numbers of a token or its first ones."""
    with jax.default_matmul_precision("highest"):
        y = jnp.einsum("btw,wn->btn", z, code.basis[: z.shape[2]])
    y = y * _by_value(code.scale, code.mean)[None, None] + code.mean.reshape(1, 1, -1)
    k, v = y.reshape(*z.shape[:2], *code.mean.shape).transpose(2, 3, 0, 1, 4, 5)
    return k, v


def read_head(
    code: Code, z: Float[Array, "b s w"], layer: Int[Array, ""], head: Int[Array, ""]
) -> tuple[Float[Array, "b s e"], Float[Array, "b s e"]]:
    """Returns keys, not turned, and values of one head of a layer from all numbers of a token."""
    with jax.default_matmul_precision("highest"):
        y = jnp.einsum("bsw,wce->cbse", z, code.basis.reshape(-1, *code.mean.shape)[:, :, layer, head])
    y = y * code.scale[:, layer, None, None, None] + code.mean[:, None, None, layer, head]
    return y[0], y[1]


def fit_code(
    chunks: Chunks,
    shape: tuple[int, int, int],
    width: int,
    *,
    weights: Float[Array, "2 l"] | None = None,
) -> Code:
    """Returns the code of `width` numbers a token that explains most of the states that three sweeps find.

    Each layer's keys, and its values, weigh alike, or as `weights` says. The first sweep takes mean and scale; the
    other two are those of a randomised range finder, its end by Nystroem's formula (arXiv 1706.05736). `shape`: layers,
    heads of keys and their size; `width` is at most the number of values in a token's states.
    """
    layers, heads, size = shape
    count = 2 * layers * heads * size
    assert 0 < width <= count, f"{width} directions of {count} values"
    with jax.default_matmul_precision("highest"):
        moments = (jnp.zeros(()), jnp.zeros(count), jnp.zeros((2, layers)))
        for y, real in chunks():
            moments = _add_moments(moments, y, real)
        seen, mean, squares = moments
        spread = jnp.sqrt(squares / seen)
        scale = jnp.where(spread > 0, spread, 1.0) * (2 * layers) ** 0.5
        if weights is not None:
            scale = scale / jnp.maximum(weights, LEAST_WEIGHT * weights.max())
    return fit_basis(chunks, mean.reshape(2, *shape), scale, width)


def fit_basis(chunks: Chunks, mean: Float[Array, "2 l k e"], scale: Float[Array, "2 l"], width: int) -> Code:
    """Returns the code of this mean and scale whose `width` numbers explain most of the states of two sweeps."""
    with jax.default_matmul_precision("highest"):
        products = jax.random.normal(jax.random.key(0), (mean.size, min(width + MORE, mean.size)))
        for _ in range(2):
            basis = jnp.linalg.qr(products)[0]
            products = jnp.zeros_like(basis)
            for y, real in chunks():
                products = _add_products(products, y, real, mean, scale, basis)
        return Code(mean, scale, _nystroem(basis, products)[:, :width].T)


def fill(  # noqa: PLR0913
    code: Code,
    y: Float[Array, "r n"],
    real: Bool[Array, " r"],
    weights: Float[Array, "r l k"],
    *,
    step: Float[Array, ""],
    variance: Float[Array, " w"],
    factors: str | None = None,
) -> Float[Array, "r n"]:
    """Returns tokens' states with what weighs little replaced by what the code says of it, solved as for a message.

    A basis that is fitted to these serves what messages say: expectation maximisation of a weighted factorisation
    (Srebro and Jaakkola 2003).
    """
    k, v = of_states(y, code.mean.shape[1:])
    kv = KVPrefix(k, v, real[None])
    by_layer = weights.transpose(1, 0, 2)[:, None]
    numbers = solve(code, kv, by_layer, step=step[None], variance=variance, factors=factors)
    z = numbers.astype(step.dtype) * step
    basis = code.basis.astype(factors or y.dtype)
    decoded = multiply("btw,wn->btn", z, basis, factors=basis.dtype)[0] * _by_value(code.scale, code.mean)[None]
    decoded = decoded + code.mean.reshape(1, -1)
    by_value = _by_state(weights[None], code.mean.shape)[0]
    return decoded + by_value * (y - decoded)


def of_states(y: Float[Array, "r n"], shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values [l 1 r k e] of tokens, the layers, heads and their size being `shape`."""
    k, v = y.astype(jnp.float32).reshape(len(y), 1, 2, *shape).transpose(2, 3, 1, 0, 4, 5)
    return k, v


def _by_value(scale: Float[Array, "2 l"], mean: Float[Array, "2 l k e"]) -> Float[Array, " n"]:
    return jnp.broadcast_to(scale[:, :, None, None], mean.shape).reshape(-1)


def _by_state(weights: Float[Array, "b t l k"], shape: tuple[int, ...]) -> Float[Array, "b t n"]:
    """Returns the weights of keys and values [2 l k e], both alike, as those of a token's states."""
    by_value = jnp.broadcast_to(weights[:, :, None, :, :, None], (*weights.shape[:2], *shape))
    return by_value.reshape(*weights.shape[:2], -1)


@jax.jit
def _add_moments(
    moments: tuple[jax.Array, jax.Array, jax.Array], y: Float[Array, "r n"], real: Bool[Array, " r"]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns count, mean and each part's squares around it with a chunk's: no difference of large sums (Chan et al.).

    A part: a layer's keys, or its values.
    """
    before, mean, squares = moments
    y, marks = y.astype(jnp.float32), real.astype(jnp.float32)[:, None]
    new = marks.sum()
    chunk_mean = (y * marks).sum(axis=0) / jnp.maximum(new, 1.0)
    apart = chunk_mean - mean
    part = new / jnp.maximum(before + new, 1.0)
    added = jnp.square((y - chunk_mean[None]) * marks).sum(axis=0) + jnp.square(apart) * before * part
    return before + new, mean + apart * part, squares + added.reshape(*squares.shape, -1).sum(axis=2)


@functools.partial(jax.jit, donate_argnums=0)
def _add_products(  # noqa: PLR0913
    products: Float[Array, "n p"],
    y: Float[Array, "r n"],
    real: Bool[Array, " r"],
    mean: Float[Array, "2 l k e"],
    scale: Float[Array, "2 l"],
    basis: Float[Array, "n p"],
) -> Float[Array, "n p"]:
    """Returns the states' second moments x basis with a chunk's share."""
    y = (y.astype(jnp.float32) - mean.reshape(1, -1)) / _by_value(scale, mean)[None]
    y = jnp.where(real[:, None], y, 0.0)
    return products + y.T @ (y @ basis)


def _nystroem(basis: Float[Array, "n p"], products: Float[Array, "n p"]) -> Float[Array, "n p"]:
    """Returns the principal directions of G, the largest first, from G basis."""
    # Rounding, or fewer states than directions, would leave a matrix without a Cholesky factor.
    shift = len(basis) ** 0.5 * jnp.finfo(jnp.float32).eps * jnp.linalg.norm(products) + 1e-30
    products = products + shift * basis
    inner = basis.T @ products
    root = jnp.linalg.cholesky((inner + inner.T) / 2)
    q, r = jnp.linalg.qr(solve_triangular(root, products.T, lower=True).T)
    return q @ jnp.linalg.svd(r)[0]
