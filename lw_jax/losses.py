"""Pure token mathematics: sums and counts, in fp32. Targets come already aligned with the logits that predict them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.types import LossTerms, Tree
from lw_jax.models.products import wide_product

Pair = tuple[jax.Array, jax.Array]  # sum, weight


def nll(logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"]) -> Pair:
    """Summed negative log-likelihood of the targets in nats, and the sum of weights."""
    return jnp.sum(token_nll(logits, targets) * weights), jnp.sum(weights)


def token_nll(logits: Float[Array, "b t v"], targets: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """Negative log-likelihood of each target in nats."""
    logits = logits.astype(jnp.float32)
    # A masked sum, no gather: its gradient belongs to the same pass over the logits; a gather's is a scatter more.
    is_target = jnp.arange(logits.shape[2], dtype=targets.dtype)[None, None] == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=2)
    return jax.nn.logsumexp(logits, axis=2) - chosen


def positions(tokens: int, *, rows: int, data: int) -> int:
    """Returns at how many positions of all rows a device, with its share of `data`, has about `tokens`; 0 stays 0."""
    return -(-tokens // max(1, rows // data))


def pieces(tokens: int, *, rows: int, length: int, data: int) -> int:
    """Returns into how many pieces of whole rows a batch is cut for about `tokens` at once on a device; 0: one.

    `rows` of `length` tokens lie on `data` devices, which take an equal part of every piece.
    """
    share = rows // data
    wanted = max(1, tokens // length) if tokens else share
    return next(count for count in range(1, share + 1) if share % count == 0 and share <= wanted * count)


def sum_of_pieces(
    measure: Callable[[Tree, Tree, Tree], LossTerms], fixed: Tree, learned: Tree, given: Tree, *, pieces: int
) -> LossTerms:
    """Returns `measure(fixed, learned, given)`, of which no more exists at once than one piece of the rows needs.

    All leaves of `learned` and `given` are [b ...]; what `measure` returns are sums over rows. Gradients of `learned`
    are taken on the way forward, while a piece's logits are there, so that nothing is computed twice. `fixed` has
    none, and of the result only `sum` has.
    """
    if pieces == 1:
        return measure(fixed, learned, given)
    return _sum_of_pieces(measure, pieces, fixed, learned, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_of_pieces(measure: Callable, pieces: int, fixed: Tree, learned: Tree, given: Tree) -> LossTerms:
    return _scan_pieces(lambda *piece: (measure(fixed, *piece), None), pieces, learned, given)[0]


def _forward(measure: Callable, pieces: int, fixed: Tree, learned: Tree, given: Tree) -> tuple[LossTerms, Tree]:
    def objective(learned: Tree, given: Tree) -> tuple[jax.Array, LossTerms]:
        terms = measure(fixed, learned, given)
        return terms.sum, terms

    def one(learned: Tree, given: Tree) -> tuple[LossTerms, Tree]:
        gradient, terms = jax.grad(objective, has_aux=True)(learned, given)
        return terms, gradient

    return _scan_pieces(one, pieces, learned, given)


def _backward(measure: Callable, pieces: int, gradient: Tree, of: LossTerms) -> tuple[None, Tree, None]:
    del measure, pieces
    return None, jax.tree.map(lambda leaf: leaf * of.sum.astype(leaf.dtype), gradient), None


_sum_of_pieces.defvjp(_forward, _backward)


def _scan_pieces(one: Callable, pieces: int, learned: Tree, given: Tree) -> tuple[LossTerms, Tree]:
    """Returns the sum of all pieces' terms, and what else `one` gives of them in the order of the rows."""

    def cut(x: jax.Array) -> jax.Array:
        # A device's rows are consecutive, so a piece is every n-th row: of each device as many.
        return x.reshape(-1, pieces, *x.shape[1:]).swapaxes(0, 1)

    def body(_: None, piece: tuple[Tree, Tree]) -> tuple[None, tuple[LossTerms, Tree]]:
        return None, one(*piece)

    _, (terms, rows) = jax.lax.scan(body, None, jax.tree.map(cut, (learned, given)))
    joined = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), rows)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), terms), joined


def chunked_logp(
    hidden: Float[Array, "b t d"], table: Float[Array, "v d"], targets: Int[Array, "b t"], *, chunk: int, vocab: int = 0
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Log-probability of each target in nats, and the mean of its position's logits; `chunk` positions at a time.

    The logits of a chunk are made again for its backward pass, so that no more than one chunk's ever exist. 0: all
    positions, kept for the backward pass. Rows of the table from `vocab` on are no token (0: all are).
    """

    def one(part: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Cast here: the gradients of the chunks are summed in the table's own precision.
        logits = wide_product("btd,vd->btv", part, table.astype(part.dtype))
        if vocab:
            real = jnp.arange(table.shape[0]) < vocab
            logits = jnp.where(real[None, None], logits, -jnp.inf)
        return -token_nll(logits, wanted), jnp.mean(logits, axis=2)

    length = hidden.shape[1]
    if not chunk or chunk >= length:
        return one(hidden, targets) if not chunk else jax.checkpoint(one)(hidden, targets)
    count = -(-length // chunk)
    hidden = jnp.pad(hidden, ((0, 0), (0, count * chunk - length), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, count * chunk - length)))

    def body(carry: None, number: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        part = (jax.lax.dynamic_slice_in_dim(x, number * chunk, chunk, axis=1) for x in (hidden, targets))
        return carry, jax.checkpoint(one)(*part)

    _, found = jax.lax.scan(body, None, jnp.arange(count, dtype=jnp.int32))
    joined = (x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :length] for x in found)
    logp, mean = joined
    return logp, mean


def hits(logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"]) -> Pair:
    """Teacher-forced accuracy: the weight of targets that are the argmax."""
    right = jnp.argmax(logits, axis=2).astype(targets.dtype) == targets
    return jnp.sum(jnp.where(right, weights, 0.0)), jnp.sum(weights)


def kl(
    teacher: Float[Array, "b t v"], student: Float[Array, "b t v"], weights: Float[Array, "b t"], *, temperature: float
) -> Pair:
    """Summed KL(teacher || student) over answer positions, times temperature squared (Hinton et al. 2015)."""
    teacher = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature, axis=2)
    student = jax.nn.log_softmax(student.astype(jnp.float32) / temperature, axis=2)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=2)
    return temperature**2 * jnp.sum(divergence * weights), jnp.sum(weights)


def first_tokens(weights: Float[Array, "b t"], count: int) -> Float[Array, "b t"]:
    """Weights over each row's first `count` tokens that add up to the row's whole weight.

    So a loss over them is a mean over examples, each counted by its tokens, and sums stay exact under accumulation.
    """
    early = jnp.where(jnp.arange(weights.shape[1])[None, :] < count, weights, 0.0)
    return early * (weights.sum(axis=1) / jnp.maximum(early.sum(axis=1), 1e-9))[:, None]


def kl_of_top(
    top_ids: Int[Array, "b t k"],
    top_logp: Float[Array, "b t k"],
    student: Float[Array, "b t v"],
    weights: Float[Array, "b t"],
    *,
    temperature: float,
) -> Pair:
    """`kl` from a teacher's k likeliest tokens and one bucket for all others: a lower bound that is exact for k = v.

    `top_logp` are log-probabilities at the same temperature.
    """
    teacher = top_logp.astype(jnp.float32)
    student = jax.nn.log_softmax(student.astype(jnp.float32) / temperature, axis=2)
    student = jnp.take_along_axis(student, top_ids, axis=2)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=2)
    rest_teacher, rest_student = _rest(teacher), _rest(student)
    divergence = divergence + jnp.exp(rest_teacher) * (rest_teacher - rest_student)
    return temperature**2 * jnp.sum(divergence * weights), jnp.sum(weights)


def negative_entropy(logits: Float[Array, "b v"], weights: Float[Array, " b"]) -> Pair:
    """Summed minus entropy of each row's distribution, in nats."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=1)
    return jnp.sum(jnp.sum(jnp.exp(logp) * logp, axis=1) * weights), jnp.sum(weights)


def misalignment(
    prefix: Float[Array, "b m d"], target: Float[Array, "b m d"], used: Bool[Array, "b m"], weights: Float[Array, " b"]
) -> Pair:
    """Summed mean over a row's used slots of 1 - cosine to the target."""
    cosine = jnp.sum(_unit(prefix) * _unit(target), axis=2)
    share = used.astype(jnp.float32)
    mean = jnp.sum((1.0 - cosine) * share, axis=1) / jnp.maximum(share.sum(axis=1), 1.0)
    return jnp.sum(mean * weights), jnp.sum(weights)


def likeness(latents: Float[Array, "b m z"], used: Bool[Array, "b m"], weights: Float[Array, " b"]) -> Pair:
    """Summed mean squared cosine between different used slots of one row."""
    unit = _unit(latents)
    cosine = jnp.einsum("bmz,bnz->bmn", unit, unit)
    pairs = (used[:, :, None] & used[:, None, :] & ~jnp.eye(used.shape[1], dtype=bool)[None]).astype(jnp.float32)
    mean = jnp.sum(cosine**2 * pairs, axis=(1, 2)) / jnp.maximum(pairs.sum(axis=(1, 2)), 1.0)
    return jnp.sum(mean * weights), jnp.sum(weights)


def _rest(logp: Float[Array, "b t k"]) -> Float[Array, "b t"]:
    """Returns the log-probability of all tokens that are not among these."""
    return jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(logp), axis=2), 1e-7))


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    # Below the root, or the gradient of a slot that is not sent, which is 0, would be no number.
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-12))
