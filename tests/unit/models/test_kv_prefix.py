"""A reader that is given its own keys and values of a text computes what it computes from the text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import batches
from lw_jax.evals import first_token
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.models import decode, decoder, kv_prefix, rotary
from lw_jax.models.wire import wire_prompt
from lw_jax.planning import hlo_counts
from tests import tiny

SAME = 3e-5  # fp32, values of unit size: the same sums in another order
APART = 1e-2  # a real difference of values of unit size
NEW = 5

CFG = tiny.DECODER
LONG = rotary.LongRope((1.3,) * 5, (3.0,) * 5, 40, 1.1)  # 40 positions: none of the rows reaches them
KINDS = {
    "": {},
    "longrope": {"rope_scaling": LONG},
    "window": {"window": 4},
    "layer norm, part of a head": {
        **{"norm": "layer", "rotated": 4, "rope_scaling": rotary.Llama3Scaling(8.0, 1.0, 4.0, 16)}
    },
}
BEFORE = jnp.asarray([[False, True, True]])
SLOTS = jnp.asarray([[True, False, True, True, False], [True] * 5])
AFTER = jnp.asarray([[False, True, True, True], [True] * 4])


@pytest.fixture(scope="module")
def texts():
    """Embeddings of the shared prefix, of the slots' tokens, and of what follows."""
    keys = jax.random.split(jax.random.key(3), 3)
    rows = ((1, BEFORE.shape[1]), SLOTS.shape, AFTER.shape)
    return [jax.random.normal(key, (*shape, CFG.width)) for key, shape in zip(keys, rows, strict=True)]


def joined(texts):
    first, slots, after = texts
    marks = jnp.concatenate([BEFORE.repeat(2, 0), SLOTS, AFTER], axis=1)
    return jnp.concatenate([first.repeat(2, 0), slots, after], axis=1), marks


@pytest.mark.parametrize(("kind", "remat"), [(kind, "full" if kind == "window" else "none") for kind in KINDS])
def test_own_keys_and_values_stand_for_the_tokens_forward_and_backward(texts, kind, remat):
    cfg, mode = dataclasses.replace(CFG, **KINDS[kind]), decoder.Mode(remat=remat)
    params, shared = tiny.draw_decoder(cfg), decoder.SharedPrefix(texts[0], BEFORE)

    def apart(slots, after):
        prefix = kv_prefix.take(params, cfg, slots, mask=SLOTS, shared_prefix=shared, mode=mode)
        return decoder.forward(params, cfg, after, mask=AFTER, shared_prefix=shared, kv_prefix=prefix, mode=mode).hidden

    def whole(slots, after):
        x, mask = joined((texts[0], slots, after))
        return decoder.forward(params, cfg, x, mask=mask, mode=mode).hidden[:, -AFTER.shape[1] :]

    real = np.asarray(AFTER)
    weight = jax.random.normal(jax.random.key(5), texts[2].shape) * AFTER[:, :, None].astype(jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def graded(run, *x):
        found, pull = jax.vjp(run, *x)
        return found, pull(weight)

    (found, of_found), (wanted, of_wanted) = (graded(run, *texts[1:]) for run in (apart, whole))
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(wanted)[real], atol=SAME)
    x, mask = joined((texts[0], jnp.zeros_like(texts[1]), texts[2]))
    mask = mask.at[:, BEFORE.shape[1] : -AFTER.shape[1]].set(False)
    without = tiny.compiled(decoder.forward, params, cfg, x, mask=mask, mode=mode).hidden[:, -AFTER.shape[1] :]
    assert np.abs(np.asarray(found - without)[real]).max() > APART
    for one, other in zip(of_found, of_wanted, strict=True):
        assert np.abs(other).max() > APART
        np.testing.assert_allclose(one, other, atol=10 * SAME)


@pytest.mark.parametrize(("kind", "unstacked"), [("", True), ("longrope", False)])
def test_generation_from_keys_and_values_gives_the_tokens_of_the_text(texts, kind, unstacked):
    cfg = dataclasses.replace(CFG, **KINDS[kind])
    params, shared = tiny.draw_decoder(cfg), decoder.SharedPrefix(texts[0], BEFORE)
    sampling, key, mode = decode.Sampling(NEW, (), unstacked=unstacked), jax.random.key(0), decoder.Mode()

    def apart(params):
        prefix = kv_prefix.take(params, cfg, texts[1], mask=SLOTS, shared_prefix=shared)
        size = BEFORE.shape[1] + SLOTS.shape[1] + AFTER.shape[1] + NEW
        cache = kv_prefix.open_cache(params, cfg, size, prefix=prefix, shared_prefix=shared)
        *begun, _ = decode.begin(params, cfg, texts[2], mask=AFTER, max_new_tokens=NEW, cache=cache, mode=mode)
        return decode.continue_generation(params, cfg, *begun, sampling=sampling, key=key, mode=mode)

    x, mask = joined(texts)
    wanted = tiny.compiled(decode.generate, params, cfg, x, mask=mask, sampling=sampling, key=key)
    np.testing.assert_array_equal(jax.jit(apart)(params), wanted)
    assert len(set(map(tuple, np.asarray(wanted)))) == 2, "rows must differ to prove anything"


@pytest.fixture(scope="module")
def wire(root):
    """(recipe, its weights, its functions) of keys and values."""
    recipe = tiny.make_recipe(root, adapter__kind="kv", only="qwen")
    return recipe, recipe.build(), WireFunctions(recipe.wire, recipe.placement)


def test_what_stands_before_messages_is_read_once_for_all_questions(wire, monkeypatch):
    recipe, built, functions = wire
    fields = jax.tree.map(jnp.asarray, recipe.data("validation").collate(range(4)))
    latents, own = functions.encode(built.trainable, fields["source"]), fields["readers"]["qwen"]
    params, adapter = built.frozen["qwen"], built.trainable["adapters"]["qwen"]
    prompt = functions.prompt_from_latents(built.trainable, params, own, latents, "qwen")
    prefix = tiny.compiled(recipe.wire.prefix, adapter, "qwen", latents, "answer")
    wanted = wire_prompt(params, own, prefix)
    assert prompt.shared_prefix is None and wanted.shared_prefix is not None
    assert prompt.positions == wanted.positions
    found = [functions.score(params, one, own, "qwen")["nll"] for one in (prompt, wanted)]
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert np.ptp(found[0]) > APART
    monkeypatch.setattr(WireFunctions, "_read_opening", lambda *_: pytest.fail("read again"))
    functions.prompt_from_latents(built.trainable, params, own, latents, "qwen")


def test_a_text_behind_an_opening_read_already_is_scored_as_the_whole_text(wire):
    recipe, built, functions = wire
    one = batches.encode(recipe.questions("validation")[3:4], layout=recipe.layout, rows=("text",))
    prompt = one.readers["qwen"]
    fields, params = jax.tree.map(jnp.asarray, one.collate([0, 0]))["readers"]["qwen"], built.frozen["qwen"]
    opening = first_token.match(prompt["before"], prompt["text"])
    whole = functions.prompt_from_text(params, fields["text"])
    reused = functions.reuse_opening(params, fields["before"], whole, "qwen", **opening)
    computed = len(prompt["text"].ids[0]) - len(prompt["before"].ids[0])
    assert 0 < reused.mask.shape[1] <= computed + 1 < whole.mask.shape[1], "a boundary may join one token"
    found = [functions.score(params, each, fields, "qwen")["nll"] for each in (whole, reused)]
    np.testing.assert_allclose(*found, rtol=1e-4)
    bare = dataclasses.replace(reused, kv_prefix=None)
    assert np.abs(functions.score(params, bare, fields, "qwen")["nll"] - found[0]).max() > APART


def test_longrope_reader_past_its_short_frequencies_is_refused(texts):
    cfg = dataclasses.replace(CFG, rope_scaling=dataclasses.replace(LONG, original_max_positions=8))
    prefix = decoder.KVPrefix(jnp.zeros((3, 2, 5, 2, 10)), jnp.zeros((3, 2, 5, 2, 10)), SLOTS)
    with pytest.raises(UserError, match=r"adapter\.kind='kv': 9 positions.* 8"):
        decoder.forward(tiny.draw_decoder(cfg), cfg, texts[2], mask=AFTER, kv_prefix=prefix)


def test_positions_of_the_prefix_cost_no_product_of_a_matrix(texts):
    """Eight slots a row or 64: the same products but for attention's own."""
    params = tiny.draw_decoder(CFG)

    def flops(count):
        shape = (CFG.layers, 2, count, CFG.kv_heads, CFG.head_dim)
        mask = jnp.ones((2, count), bool)

        def run(x, k, v):
            return decoder.forward(params, CFG, x, mask=AFTER, kv_prefix=decoder.KVPrefix(k, v, mask)).hidden.sum()

        given = texts[2], jnp.zeros(shape), jnp.zeros(shape)
        return hlo_counts.analyse(jax.jit(jax.grad(run, argnums=(0, 1, 2))).lower(*given).compile().as_text()).flops

    # Scores and sums over values, forward and thrice (with the scores computed again) backward.
    own = 2 * 2 * CFG.layers * AFTER.size * CFG.heads * CFG.head_dim * 56
    assert flops(64) - flops(8) == pytest.approx(3.5 * own, rel=0.3)
