"""The decoder's own promises; that it equals transformers' classes is held by tests/parity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import decoder
from lw_jax.planning import hlo_counts
from tests import tiny

SAME = 2e-5  # fp32, values of unit size: the same sums in another order
APART = 1e-2  # a real difference of values of unit size

CFG = tiny.DECODER


@pytest.fixture(scope="module")
def params():
    return tiny.draw_decoder(CFG)


@pytest.fixture(scope="module")
def ids():
    return jnp.asarray(np.random.default_rng(3).integers(0, CFG.vocab, (2, 7)), jnp.int32)


def forward(params, ids, mask=None, cfg=CFG, **options):
    mask = jnp.ones(ids.shape, bool) if mask is None else mask
    return tiny.compiled(decoder.forward, params, cfg, decoder.embed(params, ids), mask=mask, **options)


def unit(x):
    return np.asarray(x) / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + CFG.norm_eps)


def test_a_row_of_padding_alone_stays_finite(params, ids):
    mask = jnp.asarray([[True] * 7, [False] * 7])
    assert jnp.isfinite(forward(params, ids, mask).hidden).all()


def test_mix_picks_and_adds_the_normalised_states(params, ids):
    states = [unit(decoder.embed(params, ids))]
    for count in range(1, CFG.layers + 1):
        cut = params | {"layers": jax.tree.map(lambda leaf, n=count: leaf[:n], params["layers"])}
        cut["norm"] = jnp.ones(CFG.width)
        states.append(np.asarray(forward(cut, ids, cfg=dataclasses.replace(CFG, layers=count)).hidden))
    run = jax.jit(lambda mix: forward(params, ids, mix=mix).mixed)
    for index, state in enumerate(states):
        np.testing.assert_allclose(run(jax.nn.one_hot(index, CFG.layers + 1)), state, atol=SAME)
    shares = jax.nn.softmax(jnp.asarray([0.3, -1.0, 2.0, 0.7]))
    expected = sum(float(share) * state for share, state in zip(shares, states, strict=True))
    np.testing.assert_allclose(run(shares), expected, atol=SAME)


def test_bf16_weights_give_bf16_states_and_fp32_logits(params, ids):
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    out = forward(small, ids)
    logits = decoder.logits(small, out.hidden)
    assert (out.hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert logits.shape == (2, 7, CFG.vocab)
    # The head's sums are kept in fp32: rounded to bf16 they would equal their own rounding.
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_every_layer_is_constrained_and_recomputed_where_it_is_asked_for(params, ids):
    doubled = decoder.Mode(constrain=lambda x: 2 * x)
    assert np.abs(np.asarray(forward(params, ids, mode=doubled).hidden - forward(params, ids).hidden)).max() > APART
    gradient = jax.grad(lambda params, remat: forward(params, ids, mode=decoder.Mode(remat=remat)).hidden.sum())
    kept, again = (
        str(jax.make_jaxpr(gradient, static_argnums=1)(params, remat)).count("dot_general[")
        for remat in ("none", "full")
    )
    # q, k, v, o, gate, up and attention's with the values; its scores in both, down in neither
    assert again - kept == 7


@pytest.mark.parametrize(("change", "remat"), [({}, "full"), ({"window": 4}, "none")])
def test_shared_prefix_computed_once_equals_one_in_every_row(params, ids, change, remat):
    cfg, mode = dataclasses.replace(CFG, **change), decoder.Mode(remat=remat)
    x, first = decoder.embed(params, ids), decoder.embed(params, ids[:1, 2:])
    mask = jnp.asarray([[False, True, True, False, True, True, True], [True] * 7])
    begins = jnp.asarray([[False, False, True, True, True]])
    prefix = decoder.SharedPrefix(first, begins)
    whole = jnp.concatenate([begins.repeat(2, 0), mask], axis=1)

    def apart(x):
        return decoder.forward(params, cfg, x, mask=mask, shared_prefix=prefix, mode=mode).hidden

    def joined(x):
        rows = jnp.concatenate([first.repeat(2, 0), x], axis=1)
        return decoder.forward(params, cfg, rows, mask=whole, mode=mode).hidden[:, 5:]

    real = np.asarray(mask)
    weight = jax.random.normal(jax.random.key(5), x.shape) * mask.astype(x.dtype)[:, :, None]

    @functools.partial(jax.jit, static_argnums=0)
    def graded(run, x):
        found, pull = jax.vjp(run, x)
        return found, *pull(weight)

    (found, of_found), (expected, of_expected) = (graded(run, x) for run in (apart, joined))
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=SAME)
    without = forward(params, ids, mask, cfg, mode=mode).hidden
    assert np.abs(np.asarray(found - without)[real]).max() > APART
    np.testing.assert_allclose(of_found, of_expected, atol=10 * SAME)


def test_mix_of_many_layers_is_rounded_once():
    """33 states in bf16: their weighted sum is off by its own rounding, not by that of 33 sums."""
    cfg = dataclasses.replace(CFG, layers=32)
    params = decoder.init(jax.random.key(6), cfg, jnp.bfloat16, scale=0.2)
    x = decoder.embed(params, jnp.asarray(np.random.default_rng(1).integers(0, CFG.vocab, (2, 9)), jnp.int32))
    mix = jax.nn.softmax(jax.random.normal(jax.random.key(7), (33,)))
    run = jax.jit(lambda mix: decoder.forward(params, cfg, x, mask=jnp.ones(x.shape[:2], bool), mix=mix).mixed)
    states = np.stack([np.asarray(run(one), np.float32) for one in jnp.eye(33)])
    wanted = np.einsum("n,nbtd->btd", np.asarray(mix), states)
    found = run(mix)
    assert found.dtype == jnp.bfloat16
    error = np.sqrt(np.mean((np.asarray(found, np.float32) - wanted) ** 2) / np.mean(wanted**2))
    assert error < 0.6 * 2**-8, "half a unit in the last place at most"


def test_shared_prefix_is_computed_for_one_row(params, ids):
    x = jnp.concatenate([decoder.embed(params, ids)] * 4)
    mask, first = jnp.ones(x.shape[:2], bool), decoder.embed(params, jnp.tile(ids[:1], (1, 3)))
    prefix = decoder.SharedPrefix(first, jnp.ones(first.shape[:2], bool))

    def flops(run):
        text = jax.jit(jax.grad(lambda x: run(x).sum())).lower(x).compile().as_text()
        return hlo_counts.analyse(text).flops

    def joined(x):
        rows, marks = (
            jnp.concatenate([one.repeat(8, 0), own], axis=1) for one, own in zip(prefix, (x, mask), strict=True)
        )
        return decoder.forward(params, CFG, rows, mask=marks).hidden[:, -7:]

    apart = flops(lambda x: decoder.forward(params, CFG, x, mask=mask, shared_prefix=prefix).hidden)
    # 8 rows of 7 forward and backward and 21 forward once, instead of 8 rows of 28: 133 passes of a token for 448; what
    # the 7 attend to is the same in both.
    assert apart / flops(joined) < 0.4
