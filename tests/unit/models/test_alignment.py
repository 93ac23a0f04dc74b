"""The aligned start finds a linear relation between two embedding tables where there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import alignment, attention_matching, decoder
from lw_jax.recipes import kv_start, states_start
from tests import tiny

EXACT = 0.999  # correlation; the ridge shrinks by a thousandth


@pytest.fixture
def tables():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((501, 22)).astype(np.float32) * np.float32(3)
    unit = table / np.sqrt((table**2).mean(axis=1, keepdims=True))
    wanted = unit @ rng.standard_normal((22, 31)).astype(np.float32)
    return table, wanted, rng.permutation(501).astype(np.int32)


def read(table, target, pieces):
    """What the map to a target gives for each row of the table."""
    directions = alignment.principal_directions(jnp.asarray(table), 22)
    kernel = alignment.linear_map(jnp.asarray(table), directions, jnp.asarray(target), jnp.asarray(pieces))
    unit = table / np.sqrt((table**2).mean(axis=1, keepdims=True))
    latents = unit @ np.asarray(directions)
    return latents / np.sqrt((latents**2).mean(axis=1, keepdims=True)) @ np.asarray(kernel)


def test_directions_are_orthonormal_and_strongest_first(tables):
    table = jnp.asarray(tables[0]).at[:, 5].mul(9.0)
    directions = np.asarray(alignment.principal_directions(table, 7))
    assert directions.shape == (22, 7)
    np.testing.assert_allclose(directions.T @ directions, np.eye(7), atol=1e-5)
    assert np.abs(directions[5, 0]) > 0.95


def test_map_recovers_the_other_vocabulary_through_the_token_strings(tables):
    table, wanted, place = tables
    target = np.zeros_like(wanted)
    target[place] = wanted
    pieces = np.full((501, 4), -1, np.int32)
    pieces[:, 0] = place
    out = read(table, target, pieces)
    assert np.corrcoef(out.ravel(), wanted.ravel())[0, 1] > EXACT
    assert abs(np.sqrt((out**2).mean()) - 1) < 0.01, "outputs start at unit RMS; the adapter's gain sets the size"
    unrelated = read(table, target, np.roll(pieces, 1, axis=0))
    assert np.corrcoef(unrelated.ravel(), wanted.ravel())[0, 1] < 0.5


def test_a_string_of_several_pieces_counts_as_their_mean_and_one_of_none_not_at_all(tables):
    table, wanted, _ = tables
    pieces = np.full((501, 4), -1, np.int32)
    pieces[:, 0], pieces[:, 1] = np.arange(501), np.arange(501) + 501
    pieces[::7] = -1
    noise = np.random.default_rng(1).standard_normal(wanted.shape).astype(np.float32) * 5
    spoiled = wanted + noise
    spoiled[::7] += 1000.0
    target = np.concatenate([spoiled, wanted - noise])  # the noise cancels in the mean alone
    assert np.corrcoef(read(table, target, pieces).ravel(), wanted.ravel())[0, 1] > EXACT


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


TABLE, IDS = shape(501, 22), shape(501, 4, dtype=jnp.int32)
BITS = shape(2, 9, dtype=bool)
TEXT = attention_matching.Text(shape(2, 9, 26), BITS, BITS, BITS, shape(2, 4, dtype=bool))
HEADS = shape(2, 9, 6, 10), shape(2, 9, 2, 10), shape(2, 9, 2, 10)
LAYER = decoder.Attended(*HEADS, shape(2, 1, 9, 9, dtype=bool), shape(2, 9, 26))
WINDOWS = {"weights": shape(2, 3, 7), "used": shape(2, 3, 2), "inputs": shape(2, 3, 5)}


@pytest.mark.parametrize(
    ("closed_form", "arguments"),
    [
        (functools.partial(alignment.principal_directions, width=7), (TABLE,)),
        (alignment.linear_map, (TABLE, shape(22, 7), shape(501, 31), IDS)),
        (kv_start._multiply, (WINDOWS, shape(2, 2, 2, 7, 3, 4), shape(2, 2, 3, 4))),
        (states_start._multiply, (shape(2, 7, 5), shape(2, 7, 6), shape(2, 7, dtype=bool))),
        (
            functools.partial(attention_matching._match, tiny.DECODER),
            (TEXT, shape(2, 3, dtype=bool), LAYER),
        ),
    ],
)
def test_closed_forms_multiply_fp32_as_it_is_on_a_card_too(closed_form, arguments):
    program = jax.jit(closed_form).lower(*arguments).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in products)
