"""Losses from logits of which only a part exists at once: values and gradients of all, and nothing made twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.types import LossTerms
from lw_jax.losses import chunked, token_losses
from lw_jax.planning import hlo_counts

SAME = 1e-5  # fp32 sums of a few hundred terms of unit size
B, T, V, D = 3, 5, 7, 6
CHUNKS = [0, 2, 9]


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(4)
    hidden, table = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, D), (V + 4, D)))
    weights = jnp.asarray(rng.integers(0, 3, (B, T)), jnp.float32)
    return hidden, table, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32), weights


@jax.jit
def plain(hidden, table, targets):
    """Each target's log-probability, all logits at once."""
    logp = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, table), axis=2)
    return jnp.take_along_axis(logp, targets[:, :, None], axis=2)[:, :, 0]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_log_probabilities_and_what_states_change_of_them_are_those_of_all_logits(case, chunk):
    hidden, table, targets, _ = case

    def of_rows(logp):  # as a preference: no sum over positions, but a function of each row's
        return jnp.sum(jnp.tanh(jnp.sum(logp, axis=1)))

    def found(hidden):
        logp, mean = chunked.token_logp(hidden, table, targets, chunk=chunk)
        return of_rows(logp), (logp, mean)

    (_, (logp, mean)), gradient = jax.jit(jax.value_and_grad(found, has_aux=True))(hidden)
    np.testing.assert_allclose(logp, plain(hidden, table, targets), atol=SAME)
    np.testing.assert_allclose(mean, jnp.einsum("btd,vd->btv", hidden, table).mean(axis=2), atol=SAME)
    wanted = jax.jit(jax.grad(lambda hidden: of_rows(plain(hidden, table, targets))))(hidden)
    np.testing.assert_allclose(gradient, wanted, atol=SAME)
    _, unasked = jax.jit(found)(hidden)
    np.testing.assert_allclose(unasked, (logp, mean), atol=SAME)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_summed_loss_and_its_gradients_are_those_of_all_logits_and_filled_rows_are_no_token(case, chunk):
    hidden, table, targets, weights = case

    def found(hidden, table, vocab=V):
        total, each = chunked.summed_nll(hidden, table, targets, weights, chunk=chunk, vocab=vocab)
        return 3.0 * total, each  # the gradient of what is made of the sum passes through

    def wanted(hidden, table):
        return -3.0 * jnp.sum(plain(hidden, table, targets) * weights)

    (total, each), gradients = jax.jit(jax.value_and_grad(found, (0, 1), has_aux=True))(hidden, table)
    np.testing.assert_allclose(each, -plain(hidden, table[:V], targets), atol=SAME)
    assert float(total) == pytest.approx(float(wanted(hidden, table[:V])), rel=SAME)
    for one, other in zip(gradients, jax.jit(jax.grad(wanted, (0, 1)))(hidden, table[:V]), strict=True):
        np.testing.assert_allclose(one[: len(other)], other, atol=10 * SAME)
    assert not np.any(gradients[1][V:])
    unasked, _ = jax.jit(found)(hidden, table)
    assert float(unasked) == pytest.approx(float(total), rel=SAME)
    _, unmasked = jax.jit(functools.partial(found, vocab=0))(hidden, table)
    assert (np.asarray(unmasked) > np.asarray(each)).all(), "unmasked they take their share"


def products(function, *arguments, chunk):
    """How many times the head's whole product the compiled program's products cost."""
    found = hlo_counts.analyse(jax.jit(function).lower(*arguments).compile().as_text()).flops
    positions = -(-T // chunk) * chunk if chunk else T
    return found / (2 * B * positions * (V + 4) * D)


@pytest.mark.parametrize("chunk", [0, 2])
def test_no_product_is_computed_twice_and_no_more_logits_exist_than_a_chunk_s(case, chunk):
    hidden, table, targets, weights = case

    def of_states(hidden):
        return jnp.sum(chunked.token_logp(hidden, table, targets, chunk=chunk)[0])

    def of_both(hidden, table):
        return chunked.summed_nll(hidden, table, targets, weights, chunk=chunk)[0]

    assert products(of_states, hidden, chunk=chunk) == products(of_both, hidden, table, chunk=chunk) == 1
    # With the value: of a gradient alone the forward pass is dead code, and what is made again would count once.
    assert products(jax.value_and_grad(of_states), hidden, chunk=chunk) == 2, "forward, and the states' gradient"
    assert products(jax.value_and_grad(of_both, (0, 1)), hidden, table, chunk=chunk) == 3, "and the table's"
    for function, arguments in ((jax.grad(of_states), (hidden,)), (jax.grad(of_both, (0, 1)), (hidden, table))):
        every = f"f32[{B},{T},{V + 4}]"
        assert (every in str(jax.make_jaxpr(function)(*arguments))) == (chunk == 0)


@pytest.mark.parametrize(
    ("tokens", "rows", "data", "count"),
    [(0, 12, 1, 1), (10**6, 12, 1, 1), (5 * 12, 12, 1, 1), (5 * 11, 12, 1, 2), (5 * 3, 12, 1, 4)]
    + [(5 * 2, 12, 2, 3), (5 * 5, 12, 1, 3), (4, 12, 1, 12), (1, 12, 4, 3), (1, 7, 1, 7), (5 * 4, 7, 1, 7)],
)
def test_rows_are_cut_into_the_fewest_equal_pieces_that_are_small_enough(tokens, rows, data, count):
    assert chunked.pieces(tokens, rows=rows, length=5, data=data) == count


def test_gradients_taken_piece_by_piece_compute_no_product_twice():
    head, states = jnp.ones((V, 2)), jnp.ones((4, T, 2))

    def measure(head, states, targets):
        total, count = token_losses.nll(jnp.einsum("btd,vd->btv", states, head), targets, jnp.ones((len(targets), T)))
        return LossTerms(total, count, {})

    def objective(states, pieces):
        targets = jnp.ones((4, T), jnp.int32)
        return chunked.sum_of_pieces(measure, head, states, targets, pieces=pieces).sum

    def products(function, pieces):
        return str(jax.make_jaxpr(function, static_argnums=1)(states, pieces)).count("dot_general[")

    assert [products(jax.grad(objective), pieces) for pieces in (1, 2)] == [2, 2], "forward, and the states' gradient"
    assert [products(objective, pieces) for pieces in (1, 2)] == [1, 1]
    largest = [
        max(v.aval.size for eqn in jax.make_jaxpr(objective, static_argnums=1)(states, n).eqns for v in eqn.outvars)
        for n in (1, 4)
    ]
    assert largest[0] == 4 * T * V > largest[1], "logits of all rows exist in one case only"


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_field_without_positions_is_cut_as_the_others(pieces):
    def measure(head, states, fields):
        return LossTerms(head * jnp.sum(states * fields["weights"]), jnp.sum(fields["weights"]), {})

    fields = {"weights": jnp.arange(4.0)[:, None], "after": jnp.zeros((4, 0), jnp.int32)}  # passages ask no question
    terms = chunked.sum_of_pieces(measure, jnp.float32(2.0), jnp.ones((4, 1)), fields, pieces=pieces)
    assert (float(terms.sum), float(terms.weight)) == (12.0, 6.0)
