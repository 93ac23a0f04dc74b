"""Generation: where rows end, when the loop ends, and what the key decides."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.models import decode, decoder, rotary
from tests import tiny

CFG = dataclasses.replace(tiny.DECODER, vocab=31, width=22, layers=2, heads=4, head_dim=6, ffn=38, qkv_bias=False)
NEW = 7


@pytest.fixture(scope="module")
def params():
    return tiny.compiled(decoder.init, jax.random.key(4), CFG, jnp.float32, scale=0.5)


@pytest.fixture(scope="module")
def prompt():
    """(ids, mask): three left-padded rows of different lengths."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, CFG.vocab, (3, 5)), jnp.int32)
    return ids, jnp.asarray([[False] * 2 + [True] * 3, [True] * 5, [False] * 4 + [True]])


@pytest.fixture(scope="module")
def generate(params, prompt):
    def run(sampling, seed):
        x = decoder.embed(params, prompt[0])
        return decode.generate(params, CFG, x, mask=prompt[1], sampling=sampling, key=jax.random.key(seed))

    jitted = jax.jit(run, static_argnums=0)
    return lambda stops=(), temperature=0.0, seed=0, unstacked=False: np.asarray(
        jitted(decode.Sampling(NEW, tuple(int(stop) for stop in stops), temperature, unstacked), seed)
    )


@pytest.fixture(scope="module")
def greedy(generate):
    return generate()


def cut(ids, stops):
    """What must be left of unstopped rows: -1 from the first stop on."""
    ended = np.cumsum(np.isin(ids, stops), axis=1) > 0
    return np.where(ended, -1, ids)


def test_stop_ends_its_row_and_the_rest_is_filled(generate, greedy):
    stops = (greedy[1, 3], greedy[0, 5])
    expected = cut(greedy, stops)
    assert (expected == -1).any() and (expected != -1).any()
    np.testing.assert_array_equal(generate(stops), expected)


def test_layers_apart_give_the_same_answers_and_no_token_cuts_the_stacks(params, prompt, generate, greedy):
    stops = (greedy[1, 3], greedy[0, 5])
    np.testing.assert_array_equal(generate(stops, unstacked=True), generate(stops))

    def loops(unstacked):
        """How many loops over layers stand inside the loop over tokens."""
        x, sampling = decoder.embed(params, prompt[0]), decode.Sampling(NEW, (), unstacked=unstacked)
        run = functools.partial(decode.generate, cfg=CFG, mask=prompt[1], sampling=sampling, key=jax.random.key(0))
        found = jax.make_jaxpr(lambda params, x: run(params, x=x))(params, x)
        (tokens,) = (one for one in found.jaxpr.eqns if one.primitive.name == "while")
        return [one.primitive.name for one in tokens.params["body_jaxpr"].jaxpr.eqns].count("scan")

    assert (loops(unstacked=False), loops(unstacked=True)) == (1, 0)


LONG = rotary.LongRope((1.0,) * (CFG.head_dim // 2), (3.0,) * (CFG.head_dim // 2), 7, 1.1)


@pytest.mark.parametrize(("kind", "new"), [({}, 2), ({"window": 3}, NEW), ({"rope_scaling": LONG}, NEW)], ids=str)
def test_an_answer_is_scored_in_the_prompt_s_pass_and_forgotten(params, prompt, kind, new):
    cfg = dataclasses.replace(CFG, **kind)
    x, mask, sampling = decoder.embed(params, prompt[0]), prompt[1], decode.Sampling(new, ())
    ids = jnp.asarray(np.random.default_rng(1).integers(0, CFG.vocab, (3, 4)), jnp.int32)
    real = jnp.asarray([[True] + [False] * 3, [True] * 4, [True, True, False, False]])  # the second row passes LONG

    def both(params):
        answer, mode = (decoder.embed(params, ids), real), decoder.Mode()
        *begun, logits = decode.begin(params, cfg, x, mask=mask, answer=answer, max_new_tokens=new)
        return logits, decode.continue_generation(
            params, cfg, *begun, sampling=sampling, key=jax.random.key(0), mode=mode
        )

    logits, found = jax.jit(both)(params)
    whole = jnp.concatenate([x, decoder.embed(params, ids)], axis=1)
    joined = jnp.concatenate([mask, real], axis=1)
    hidden = tiny.compiled(decoder.forward, params, cfg, whole, mask=joined).hidden
    wanted = np.asarray(decoder.logits(params, hidden[:, x.shape[1] - 1 :]))
    scored = np.pad(real, ((0, 0), (1, 0)), constant_values=True)
    np.testing.assert_allclose(np.asarray(logits)[scored], wanted[scored], atol=1e-4)
    greedy = tiny.compiled(decode.generate, params, cfg, x, mask=mask, sampling=sampling, key=jax.random.key(0))
    np.testing.assert_array_equal(found, greedy)


def test_loop_ends_when_every_row_has_stopped(params, prompt, monkeypatch, generate, greedy):
    steps = []
    embed = decoder.embed

    def counted(params, ids):
        jax.debug.callback(lambda: steps.append(1))
        return embed(params, ids)

    def count(stops):
        steps.clear()
        x, sampling = embed(params, prompt[0]), decode.Sampling(NEW, tuple(int(stop) for stop in stops))
        jax.block_until_ready(decode.generate(params, CFG, x, mask=prompt[1], sampling=sampling, key=jax.random.key(0)))
        jax.effects_barrier()
        return len(steps)

    monkeypatch.setattr(decoder, "embed", counted)
    assert count(()) == NEW - 1, "nothing follows from the last token"
    stops = (greedy[0, 0], greedy[1, 1], greedy[2, 0])
    longest = int((cut(greedy, stops) >= 0).sum(axis=1).max())
    assert longest + 1 < NEW
    assert count(stops) == longest


def test_sampling_is_a_function_of_the_key(generate, greedy):
    first = generate(temperature=1.5, seed=1)
    np.testing.assert_array_equal(first, generate(temperature=1.5, seed=1))
    assert not np.array_equal(first, generate(temperature=1.5, seed=2))
    assert not np.array_equal(first, greedy)
    np.testing.assert_array_equal(generate(temperature=1e-5, seed=3), greedy)
