"""Keys and values of a text reduced by attention matching: all of them are the text, few are nearer than a choice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.models import attention_matching, decoder, kv_prefix, rotary
from tests import tiny

SAME = 3e-5  # fp32, values of unit size: the same sums in another order
NEARER = (
    0.85  # a random reader attends to all alike; x the error of the same number of keys and values chosen at random
)
LENGTH, FEW = 24, 6

CFG = dataclasses.replace(tiny.DECODER, max_positions=128)
LONG = rotary.LongRope((1.3,) * 5, (3.0,) * 5, 80, 1.1)
KINDS = {
    "": {},
    "longrope": {"rope_scaling": LONG},
    "layer norm": {"norm": "layer"},
}
BEFORE = 2  # tokens of the shared prefix
PADDING = (3, 0)  # of the two texts


@functools.partial(jax.jit, static_argnums=0)
def drawn(cfg):
    return decoder.init(jax.random.key(1), cfg, jnp.float32, scale=0.4)


def tokens(seed, lengths, width):
    ids = np.random.default_rng(seed).integers(0, CFG.vocab, (len(lengths), width)).astype(np.int32)
    mask = np.arange(width) >= width - np.array(lengths)[:, None]
    return {"ids": jnp.asarray(ids), "mask": jnp.asarray(mask)}


@pytest.fixture(scope="module")
def fields():
    before = tokens(0, (BEFORE,), BEFORE)
    context = tokens(1, [LENGTH + BEFORE - one for one in PADDING], LENGTH + BEFORE)
    for row, padding in enumerate(PADDING):
        context["ids"] = context["ids"].at[row, padding : padding + BEFORE].set(before["ids"][0])
    return {"before": before, "context": context, "asked": tokens(2, (4, 5), 5), "probe": tokens(3, (5, 3), 5)}


@functools.partial(jax.jit, static_argnames="cfg")
def read(params, cfg, fields, prefix):
    shared = decoder.SharedPrefix(decoder.embed(params, fields["before"]["ids"]), fields["before"]["mask"])
    x, mask = decoder.embed(params, fields["asked"]["ids"]), fields["asked"]["mask"]
    return decoder.forward(params, cfg, x, mask=mask, shared_prefix=shared, kv_prefix=prefix).hidden


@functools.partial(jax.jit, static_argnames="cfg")
def read_text(params, cfg, fields):
    x = jnp.concatenate([decoder.embed(params, fields[key]["ids"]) for key in ("context", "asked")], axis=1)
    mask = jnp.concatenate([fields[key]["mask"] for key in ("context", "asked")], axis=1)
    return decoder.forward(params, cfg, x, mask=mask).hidden[:, -fields["asked"]["mask"].shape[1] :]


def real(states, fields):
    return np.asarray(states)[np.asarray(fields["asked"]["mask"])]


def compact(params, cfg, fields, room):
    text = attention_matching.join(params, fields["context"], fields["probe"], before=jnp.full((2, 1), BEFORE))
    slots = jnp.asarray(np.arange(max(room)) < np.array(room)[:, None])
    return jax.jit(lambda: attention_matching.compact(params, cfg, text, slots))()


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_slots_as_tokens_are_the_text(fields, kind):
    cfg = dataclasses.replace(CFG, **KINDS[kind])
    params = drawn(cfg)
    found = compact(params, cfg, fields, (LENGTH, LENGTH))
    np.testing.assert_array_equal(found.mask.sum(axis=1), [LENGTH - one for one in PADDING], "each its own number")
    ours, text = read(params, cfg, fields, found), read_text(params, cfg, fields)
    np.testing.assert_allclose(real(ours, fields), real(text, fields), atol=10 * SAME)


@pytest.mark.parametrize("kind", ["", "longrope"])
def test_few_slots_are_nearer_to_the_text_than_tokens_chosen_at_random(fields, kind):
    cfg = dataclasses.replace(CFG, **KINDS[kind])
    params, rng = drawn(cfg), np.random.default_rng(0)
    wanted = read_text(params, cfg, fields)
    found = compact(params, cfg, fields, (FEW, FEW))
    assert found.k.shape == (cfg.layers, 2, FEW, cfg.kv_heads, cfg.head_dim)
    error = np.square(real(read(params, cfg, fields, found) - wanted, fields)).mean()
    x, mask = decoder.embed(params, fields["context"]["ids"]), fields["context"]["mask"]
    own = tiny.compiled(kv_prefix.take, params, cfg, x, mask=mask)
    others = []
    for _ in range(8):
        chosen = np.stack([rng.permutation(np.arange(one + BEFORE, LENGTH + BEFORE))[:FEW] for one in PADDING])
        k, v = (jnp.take_along_axis(one, chosen[None, :, :, None, None], axis=2) for one in (own.k, own.v))
        prefix = decoder.KVPrefix(k, v, jnp.ones((2, FEW), bool))
        others.append(np.square(real(read(params, cfg, fields, prefix) - wanted, fields)).mean())
    assert error < NEARER * np.mean(others) and error < min(others)


def test_text_beyond_the_short_frequencies_is_refused(fields):
    cfg = dataclasses.replace(CFG, rope_scaling=dataclasses.replace(LONG, original_max_positions=40))
    with pytest.raises(UserError, match=r"eval\.rows.*ceiling.* 40"):
        compact(drawn(cfg), cfg, fields, (FEW, FEW))
