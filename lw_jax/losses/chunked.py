"""Chunked cross-entropy; full logits are never materialised.

The forward pass computes each chunk's gradient with its logits, so that the backward pass recomputes nothing.
`sum_of_pieces` chunks rows, for objectives of several terms; `token_logp` and `summed_nll` chunk positions.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lw_jax.core.types import LossTerms, Tree
from lw_jax.losses import token_losses
from lw_jax.models.products import wide_product

Two = tuple[jax.Array, jax.Array]


def positions(tokens: int, *, rows: int, data: int) -> int:
    """Returns the positions per chunk that give a device about `tokens` of its share of rows; 0 stays 0."""
    return -(-tokens // max(1, rows // data))


def pieces(tokens: int, *, rows: int, length: int, data: int) -> int:
    """Returns the number of row chunks that give a device about `tokens` at once; 0 tokens: one chunk.

    `rows` of `length` tokens are sharded over `data` devices; each takes an equal part of every chunk.
    """
    share = rows // data
    limit = max(1, tokens // length) if tokens else share
    return next(count for count in range(1, share + 1) if share % count == 0 and share <= limit * count)


def sum_of_pieces(
    measure: Callable[[Tree, Tree, Tree], LossTerms], fixed: Tree, inputs: Tree, constants: Tree, *, pieces: int
) -> LossTerms:
    """Returns `measure(fixed, inputs, constants)` in the memory of one chunk of rows.

    All leaves of `inputs` and `constants` are [b ...]; `measure` returns sums over rows. Only `inputs` has a gradient,
    and only from the result's `sum`; it is computed in the forward pass.
    """
    if pieces == 1:
        return measure(fixed, inputs, constants)
    return _sum_of_pieces(measure, pieces, fixed, inputs, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_of_pieces(measure: Callable, pieces: int, fixed: Tree, inputs: Tree, constants: Tree) -> LossTerms:
    return _scan_pieces(lambda *piece: (measure(fixed, *piece), None), pieces, inputs, constants)[0]


def _sum_of_pieces_forward(
    measure: Callable, pieces: int, fixed: Tree, inputs: Tree, constants: Tree
) -> tuple[LossTerms, Tree]:
    def objective(inputs: Tree, constants: Tree) -> tuple[jax.Array, LossTerms]:
        terms = measure(fixed, inputs, constants)
        return terms.sum, terms

    def terms_and_gradient(inputs: Tree, constants: Tree) -> tuple[LossTerms, Tree]:
        gradient, terms = jax.grad(objective, has_aux=True)(inputs, constants)
        return terms, gradient

    return _scan_pieces(terms_and_gradient, pieces, inputs, constants)


def _sum_of_pieces_backward(measure: Callable, pieces: int, gradient: Tree, of: LossTerms) -> tuple[None, Tree, None]:
    return None, _times(gradient, of.sum), None


_sum_of_pieces.defvjp(_sum_of_pieces_forward, _sum_of_pieces_backward)


def _times(gradients: Tree, of_sum: jax.Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf * of_sum.astype(leaf.dtype), gradients)


def _scan_pieces(compute: Callable, pieces: int, inputs: Tree, constants: Tree) -> tuple[LossTerms, Tree]:
    """Returns the sum of all chunks' terms, and the other outputs of `compute` in row order."""

    def cut(x: jax.Array) -> jax.Array:
        # A device's rows are consecutive, so a chunk is every n-th row: equally many of each device.
        return x.reshape(len(x) // pieces, pieces, *x.shape[1:]).swapaxes(0, 1)  # -1 is undefined for an empty field

    def body(_: None, piece: tuple[Tree, Tree]) -> tuple[None, tuple[LossTerms, Tree]]:
        return None, compute(*piece)

    _, (terms, rows) = jax.lax.scan(body, None, jax.tree.map(cut, (inputs, constants)))
    joined = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), rows)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), terms), joined


def token_logp(
    hidden: Float[Array, "b t d"], table: Float[Array, "v d"], targets: Int[Array, "b t"], *, chunk: int
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Log-probability of each target in nats, and the mean of its position's logits, by chunks of positions (0: one).

    Only `hidden` has a gradient, and only from the log-probabilities; it is computed in the forward pass.
    """
    return _token_logp(chunk, hidden, table, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logp(chunk: int, hidden: jax.Array, table: jax.Array, targets: jax.Array) -> Two:
    _, outputs = _scan_chunks(lambda _, *part: (None, _read_head(table, *part)), chunk, None, (hidden, targets))
    return outputs


def _token_logp_forward(chunk: int, hidden: jax.Array, table: jax.Array, targets: jax.Array) -> tuple[Two, jax.Array]:
    def logp_and_gradient(_: None, hidden: jax.Array, targets: jax.Array) -> tuple[None, tuple[jax.Array, ...]]:
        logp, vjp, mean = jax.vjp(lambda hidden: _read_head(table, hidden, targets), hidden, has_aux=True)
        # A target depends on its own position's state alone: one vjp gives the gradients of all positions.
        return None, (logp, mean, *vjp(jnp.ones_like(logp)))

    _, (logp, mean, gradients) = _scan_chunks(logp_and_gradient, chunk, None, (hidden, targets))
    return (logp, mean), gradients


def _token_logp_backward(chunk: int, gradients: jax.Array, of: Two) -> tuple[jax.Array, None, None]:
    return (gradients.astype(jnp.float32) * of[0][:, :, None]).astype(gradients.dtype), None, None


_token_logp.defvjp(_token_logp_forward, _token_logp_backward)


def summed_nll(  # noqa: PLR0913  (as `token_logp`, for a trainable table)
    hidden: Float[Array, "b t d"],
    table: Float[Array, "v d"],
    targets: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    *,
    chunk: int,
    vocab: int = 0,
    factors: str | None = None,
) -> tuple[Float[Array, ""], Float[Array, "b t"]]:
    """Weighted sum of all targets' negative log-likelihoods, and each of them, by chunks of positions (0: one).

    Only the sum has gradients, with respect to `hidden` and `table`. Rows of the table from `vocab` on are padding
    (0: none). `factors` is the dtype to which the table is cast for its products (None: its own).
    """
    read = functools.partial(_read_head, vocab=vocab, factors=factors)
    return _summed_nll(chunk, read, hidden, table, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_nll(
    chunk: int, read: Callable, hidden: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array
) -> Two:
    def chunk_nll(_: None, *part: jax.Array) -> tuple[None, jax.Array]:
        return None, -read(table, *part)[0]

    _, nll = _scan_chunks(chunk_nll, chunk, None, (hidden, targets))
    return jnp.sum(nll * weights), nll


def _summed_nll_forward(
    chunk: int, read: Callable, hidden: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Two, Two]:
    def add_chunk(of_table: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array):
        def objective(hidden: jax.Array, table: jax.Array) -> Two:
            nll = -read(table, hidden, targets)[0]
            return jnp.sum(nll * weights), nll

        (of_hidden, more), nll = jax.grad(objective, (0, 1), has_aux=True)(hidden, table)
        return of_table + more, (nll, of_hidden)

    of_table, (nll, of_hidden) = _scan_chunks(add_chunk, chunk, jnp.zeros_like(table), (hidden, targets, weights))
    return (jnp.sum(nll * weights), nll), (of_hidden, of_table)


def _summed_nll_backward(
    chunk: int, read: Callable, gradients: Two, of: Two
) -> tuple[jax.Array, jax.Array, None, None]:
    return *_times(gradients, of[0]), None, None


_summed_nll.defvjp(_summed_nll_forward, _summed_nll_backward)


def _read_head(
    table: jax.Array, hidden: jax.Array, targets: jax.Array, *, vocab: int = 0, factors: str | None = None
) -> Two:
    # Cast here: the gradients of the chunks are summed in the table's own precision.
    logits = wide_product("btd,vd->btv", hidden, table if factors is None else table.astype(factors))
    if vocab:
        real = jnp.arange(table.shape[0]) < vocab
        logits = jnp.where(real[None, None], logits, -jnp.inf)
    return -token_losses.token_nll(logits, targets), jnp.mean(logits, axis=2)


def _scan_chunks(compute: Callable, chunk: int, carry: Tree, inputs: tuple[jax.Array, ...]) -> tuple[Tree, Tree]:
    """Scans `compute(carry, *inputs)` over chunks of positions (0: one chunk) and joins its outputs.

    All of `inputs` and of the outputs are [b t ...]. The last chunk is padded with zeros.
    """
    length = inputs[0].shape[1]
    if not 0 < chunk < length:
        return compute(carry, *inputs)
    count = -(-length // chunk)
    filled = [jnp.pad(x, ((0, 0), (0, count * chunk - length), *[(0, 0)] * (x.ndim - 2))) for x in inputs]

    def body(carry: Tree, number: jax.Array) -> tuple[Tree, Tree]:
        return compute(carry, *(jax.lax.dynamic_slice_in_dim(x, number * chunk, chunk, axis=1) for x in filled))

    carry, ys = jax.lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))
    return carry, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length], ys)
