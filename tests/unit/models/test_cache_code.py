"""Numbers of a cache by importance-weighted least squares: a dense solution, all neighbours, padding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import cache_code
from lw_jax.models.decoder import KVPrefix

LAYERS, ROWS, TOKENS, HEADS, SIZE, WIDTH = 3, 2, 5, 2, 4, 7
MANY = 300  # sweeps until nothing moves
FINE = 1e-3  # step


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cache_code, "BLOCK", 3)  # of WIDTH numbers, the last block not full


@pytest.fixture(scope="module")
def problem():
    """A code, a text whose second row is padded, and squared attention to its keys."""
    keys = jax.random.split(jax.random.key(0), 6)
    basis = jnp.linalg.qr(jax.random.normal(keys[0], (2 * LAYERS * HEADS * SIZE, WIDTH)))[0].T
    basis = basis.at[: WIDTH // 2].multiply(1.7)  # training makes some directions longer
    mean = jax.random.normal(keys[1], (2, LAYERS, HEADS, SIZE))
    code = cache_code.Code(mean, jax.random.uniform(keys[2], (2, LAYERS), minval=0.5, maxval=2.0), basis)
    k, v = (2 * jax.random.normal(key, (LAYERS, ROWS, TOKENS, HEADS, SIZE)) for key in keys[3:5])
    mask = np.arange(TOKENS) < np.array([TOKENS, 3])[:, None]
    power = (
        jax.random.exponential(keys[5], (LAYERS, ROWS, TOKENS, HEADS)) ** 2 * mask.astype(np.float32)[None, :, :, None]
    )
    return code, KVPrefix(k, v, jnp.asarray(mask)), power


def weigh(kv, power, root=1.0):
    return cache_code.importance(power, jnp.ones(power.shape, bool), kv.mask, root)


def solve(problem, weights, step, sweeps=MANY):
    code, kv, _ = problem
    settings = {"step": jnp.full(kv.mask.shape[0], step), "variance": variances(), "sweeps": sweeps}
    run = jax.jit(lambda *args: cache_code.solve(*args, **settings))  # not one that was traced with other constants
    return np.asarray(run(code, kv, weights))


def variances():
    return jnp.linspace(2.0, 0.1, WIDTH)


def test_numbers_in_fine_steps_are_the_dense_weighted_least_squares(problem):
    code, kv, power = problem
    weights = weigh(kv, power)
    found, basis = solve(problem, weights, FINE) * FINE, np.asarray(code.basis, np.float64)
    for row, token, x, w in cases(problem, weights):
        wanted = np.linalg.solve((basis * w) @ basis.T, (basis * w) @ x)
        np.testing.assert_allclose(found[row, token], wanted, atol=10 * FINE)


def test_no_other_whole_number_in_any_place_lessens_the_sum(problem):
    code, kv, power = problem
    weights, step = weigh(kv, power), 1.5
    found, basis = solve(problem, weights, step), np.asarray(code.basis, np.float64)
    mean = np.where(kv.mask, np.asarray(weights).mean(axis=(0, 3)), 0.0).sum(axis=1) / np.asarray(kv.mask).sum(axis=1)
    least_squares = []
    for row, token, x, w in cases(problem, weights):
        numbers = found[row, token]

        def total(numbers, row=row, x=x, w=w):
            error = w @ np.square(x - numbers * step @ basis) / 2
            return error + 1.2 / 12 * mean[row] * step**2 * nats(numbers, step)

        for number, place in itertools.product(range(-9, 10), range(WIDTH)):
            other = numbers.copy()
            other[place] = number
            assert total(numbers) <= total(other) + 1e-4
        rounded = np.rint(np.linalg.solve((basis * w) @ basis.T, (basis * w) @ x) / step)
        least_squares.append(total(rounded) - total(numbers))
    assert np.mean(least_squares) > 0.02, "rounding the least squares is worse"
    assert 0.1 < (found == 0).mean() < 0.9 and np.abs(found).max() > 2


def nats(numbers, step):
    """What Laplacian numbers of these variances take more than zeros do, from their probabilities."""
    mean = 0.7 * np.sqrt(np.asarray(variances(), np.float64))
    share = np.where(
        numbers == 0,
        1 - np.exp(-step / (2 * mean)),
        np.exp(-(np.abs(numbers) - 0.5) * step / mean) * (1 - np.exp(-step / mean)) / 2,
    )
    return (np.log(1 - np.exp(-step / (2 * mean))) - np.log(share)).sum()


def test_pieces_of_tokens_give_the_same_numbers(problem, monkeypatch):
    weights = weigh(*problem[1:])
    whole = solve(problem, weights, 0.5)
    three = 3 * 4 * 2 * LAYERS * HEADS * SIZE  # of 10 tokens, the last piece not full
    monkeypatch.setitem(cache_code._PIECE_BYTES, "cpu", three)
    np.testing.assert_array_equal(solve(problem, weights, 0.5), whole)


def cases(problem, weights):
    """Yields of each token its place, its states in the code's units and their weights, in fp64."""
    code, kv, _ = problem
    y = np.stack([kv.k, kv.v]).astype(np.float64).transpose(2, 3, 0, 1, 4, 5)
    x = (y - np.asarray(code.mean)) / np.asarray(code.scale)[:, :, None, None]
    w = np.broadcast_to(np.asarray(weights).transpose(1, 2, 0, 3)[:, :, None, :, :, None], x.shape)
    for row, token in np.ndindex(ROWS, TOKENS):
        yield row, token, x[row, token].ravel(), w[row, token].ravel()


def test_importance_is_the_kept_share_of_a_layers_mean(problem):
    _, kv, power = problem
    kept = jax.random.bernoulli(jax.random.key(9), 0.6, power.shape)
    for root in (1.0, 0.5):
        found = np.asarray(cache_code.importance(power, kept, kv.mask, root))
        for layer, row in np.ndindex(LAYERS, ROWS):
            own = np.where(kept, power, 0)[layer, row, np.asarray(kv.mask[row])]
            wanted = np.clip((own / own.mean()) ** root / 8, 0.02 / 8, 1)
            np.testing.assert_allclose(found[layer, row, np.asarray(kv.mask[row])], wanted, rtol=1e-5)


def test_padding_changes_no_number(problem):
    code, kv, power = problem
    found = solve(problem, weigh(kv, power), 0.2)
    cut = KVPrefix(kv.k[:, 1:, :3], kv.v[:, 1:, :3], kv.mask[1:, :3])
    alone = solve((code, cut, None), weigh(cut, power[:, 1:, :3]), 0.2)
    np.testing.assert_array_equal(alone[0], found[1, :3])


def test_a_basis_fitted_anew_serves_the_states_that_weigh_and_keeps_those_that_do_not_apart():
    shape, tokens, width = (2, 1, 4), 400, 3
    rng = np.random.default_rng(7)
    # What weighs lies on 3 directions of its own; what does not varies ten times as much, on others.
    y = rng.normal(size=(tokens, 3)) @ rng.normal(size=(3, 16))
    weighs = rng.random((tokens, 2, 1)) < 0.4
    by_state = np.broadcast_to(weighs[:, None, :, :, None], (tokens, 2, *shape)).reshape(tokens, 16)
    y = np.where(by_state, y, 10 * rng.normal(size=(tokens, 16))).astype(np.float32)
    weights, real = jnp.asarray(np.where(weighs, 1.0, 1e-3), jnp.float32), jnp.ones(tokens, bool)
    step = 0.1
    settings = {"step": jnp.float32(step), "variance": jnp.ones(width)}

    def error(code):
        filled = cache_code.fill(code, jnp.asarray(y), real, weights, **settings)
        np.testing.assert_allclose(np.asarray(filled)[by_state], y[by_state], rtol=1e-4, atol=1e-4)
        kv = cache_code.KVPrefix(*cache_code.of_states(jnp.asarray(y), shape), real[None])
        numbers = cache_code.solve(
            code, kv, weights.transpose(1, 0, 2)[:, None], **settings | {"step": jnp.full(1, step)}, sweeps=MANY
        )
        decoded = np.asarray(cache_code.states(*cache_code.read(code, step * numbers.astype(np.float32))))[0]
        return filled, np.square(decoded - y)[by_state].mean()

    code = cache_code.fit_code(lambda: [(jnp.asarray(y), real)], shape, width)
    filled, first = error(code)
    again = cache_code.fit_basis(lambda: [(filled, real)], code.mean, code.scale, width)
    assert error(again)[1] < 0.75 * first
