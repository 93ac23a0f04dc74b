"""A prefix of which each head keeps keys of its own: masked or packed it is the same, and packed it is small."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lw_jax.models import decode, decoder, kv_prefix
from tests import tiny

SAME = 3e-5  # fp32, values of unit size: the same sums in another order
APART = 1e-2  # a real difference of values of unit size
NEW = 5
CFG = tiny.DECODER
ROWS = 4
BEFORE = jnp.asarray([[False, True, True]])
SLOTS = jnp.asarray(np.arange(9) >= np.array([0, 2, 1, 4])[:, None])
AFTER = jnp.asarray(np.arange(4) >= np.array([0, 1, 0, 2])[:, None])


def draw(number, *shape):
    return jax.random.normal(jax.random.key(number), shape)


SHARED = decoder.SharedPrefix(draw(0, *BEFORE.shape, CFG.width), BEFORE)
TEXT, ASKED, ANSWER = (draw(i, *one, CFG.width) for i, one in enumerate((SLOTS.shape, AFTER.shape, (ROWS, 3)), 1))
# About 0.4 of all keys; one head keeps none at all.
KEPT = (draw(4, CFG.layers, *SLOTS.shape, CFG.kv_heads) > 0.3).at[1, :, :, 0].set(False) & SLOTS[None, :, :, None]
BIAS = draw(5, *KEPT.shape)
SIZE = BEFORE.shape[1] + AFTER.shape[1] + max(ANSWER.shape[1], NEW)


@pytest.fixture(scope="module")
def params():
    return tiny.draw_decoder(CFG)


@pytest.fixture(scope="module")
def whole(params):
    return tiny.compiled(kv_prefix.take, params, CFG, TEXT, mask=SLOTS, shared_prefix=SHARED)


def sizes():
    return tuple(tuple(map(int, row)) for row in np.asarray(KEPT).sum(axis=2).max(axis=1))


def read(params, prefix, mode=decoder.Mode(), x=ASKED):
    given = {"shared_prefix": SHARED, "kv_prefix": prefix, "mode": mode}
    return tiny.compiled(decoder.forward, params, CFG, x, mask=AFTER, **given).hidden


def same(found, wanted, tolerance=SAME, mask=AFTER):
    np.testing.assert_allclose(
        np.asarray(found)[np.asarray(mask)], np.asarray(wanted)[np.asarray(mask)], atol=tolerance
    )


@pytest.mark.parametrize(("remat", "factors"), [("none", None), ("full", "bfloat16")])
def test_all_keys_and_no_bias_are_the_text_forward_and_backward(params, whole, remat, factors):
    mode = decoder.Mode(remat=remat, factors=factors)
    every = jnp.broadcast_to(SLOTS[None, :, :, None], KEPT.shape)
    weight = draw(6, *ASKED.shape) * AFTER[:, :, None].astype(jnp.float32)

    def run(x, v, *chosen):
        prefix = whole._replace(v=v)
        return jnp.sum(read(params, kv_prefix.choose(prefix, *chosen) if chosen else prefix, mode, x) * weight)

    gradient = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))
    value, of = gradient(ASKED, whole.v)
    other, of_other = gradient(ASKED, whole.v, every)
    np.testing.assert_allclose(other, value, rtol=1e-6)
    for one, wanted in zip(of_other, of, strict=True):
        np.testing.assert_allclose(one, wanted, atol=SAME)
    assert abs(gradient(ASKED, whole.v, KEPT)[0] - value) > APART


def test_a_key_that_no_head_keeps_is_not_there_but_its_position_is(params, whole):
    """Zeroed values and keys of a lost key change nothing; what follows stands where it stood."""
    lost = jnp.zeros_like(SLOTS).at[:, 5].set(True)
    kept = jnp.broadcast_to((SLOTS & ~lost)[None, :, :, None], KEPT.shape)
    wanted = read(params, kv_prefix.choose(whole, kept))
    k, v = (jnp.where(kept[..., None], one, 7.0) for one in whole[:2])
    same(read(params, kv_prefix.choose(whole._replace(k=k, v=v), kept)), wanted)
    fewer = whole._replace(mask=SLOTS & ~lost)  # what follows is nearer by one
    assert np.abs(np.asarray(read(params, fewer) - wanted)).max() > APART


def test_a_shared_prefix_may_stand_among_them(params, whole):
    chosen = kv_prefix.choose(whole, KEPT, BIAS)
    joined = kv_prefix.prepend(tiny.compiled(kv_prefix.take, params, CFG, SHARED.x, mask=SHARED.mask), chosen)
    found = tiny.compiled(decoder.forward, params, CFG, ASKED, mask=AFTER, kv_prefix=joined).hidden
    same(found, read(params, chosen))


def pack(cfg, prefix, sizes, seen):
    def take(layer, head, places):
        return tuple(jax.vmap(lambda x, at: x[at])(x[layer, :, :, head], places) for x in (prefix.k, prefix.v))

    return kv_prefix.pack(cfg, prefix.mask, prefix.bias, sizes, take, seen=seen)


def begin(params, whole, packed, mode, devices=1, unstacked=False, opening=False):
    """Logits of the first new token and of the answer, and the generated ids."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    rows = {"asked": ASKED, "after": AFTER, "answer": ANSWER}
    place = NamedSharding(mesh, PartitionSpec("data"))
    rows = jax.device_put(rows, place)
    prefix = kv_prefix.choose(whole, KEPT, BIAS)
    by_row = NamedSharding(mesh, PartitionSpec(None, "data"))
    prefix = jax.device_put(prefix, prefix._replace(k=by_row, v=by_row, bias=by_row, mask=place))

    @jax.jit
    def run(params, prefix, rows):
        size = SIZE if packed else SIZE + SLOTS.shape[1]
        before = {"prefix": prefix, "shared_prefix": SHARED}
        if packed:
            keys = pack(CFG, prefix, sizes(), BEFORE.sum(axis=1, keepdims=True, dtype=jnp.int32))
            before |= {"packed": keys, "prefix": None}
        if opening:  # the shared prefix as keys that were read before
            read_before = kv_prefix.take(params, CFG, SHARED.x, mask=SHARED.mask)
            before |= {"prefix": kv_prefix.repeat(read_before, ROWS), "shared_prefix": None}
        cache = kv_prefix.open_cache(params, CFG, size, **before, mode=mode)
        answer = (rows["answer"], jnp.ones(rows["answer"].shape[:2], bool))
        first, memory, scored = decode.begin(
            params, CFG, rows["asked"], mask=rows["after"], answer=answer, max_new_tokens=NEW, cache=cache, mode=mode
        )
        sampling = decode.Sampling(NEW, (), unstacked=unstacked)
        ids = decode.continue_generation(
            params, CFG, first, memory, sampling=sampling, key=jax.random.key(0), mode=mode
        )
        return first, scored, ids

    return run(params, prefix, rows)


@pytest.fixture(scope="module")
def masked(params, whole):
    return begin(params, whole, False, decoder.Mode())


def test_a_cache_reads_what_the_pass_reads(params, whole, masked):
    hidden = read(params, kv_prefix.choose(whole, KEPT, BIAS))
    np.testing.assert_allclose(masked[0], decoder.logits(params, hidden[:, -1:])[:, 0], atol=SAME)
    assert np.abs(masked[0] - decoder.logits(params, read(params, whole)[:, -1:])[:, 0]).max() > APART
    assert len(set(map(tuple, np.asarray(masked[2])))) == ROWS, "rows must differ to prove anything"


WAYS = {
    "masked, unstacked": {"packed": False, "unstacked": True},
    "packed, unstacked": {"packed": True, "unstacked": True},
    "packed on 4": {"packed": True, "devices": 4},
    "packed behind an opening's keys": {"packed": True, "opening": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_masked_and_packed_answer_and_score_alike(params, whole, masked, way):
    found = begin(params, whole, mode=decoder.Mode(), **WAYS[way])
    for one, wanted in zip(found, masked, strict=True):
        np.testing.assert_allclose(one, wanted, atol=SAME)


def test_a_packed_prefix_computes_few_keys_but_the_kept(whole):
    counts, asked = np.array(sizes()), []

    def take(layer, head, places):
        asked.append(places.shape[1])
        return jnp.zeros((*places.shape, CFG.head_dim)), jnp.zeros((*places.shape, CFG.head_dim))

    with jax.disable_jit():
        chosen = kv_prefix.choose(whole, KEPT, BIAS)
        kv_prefix.pack(CFG, chosen.mask, chosen.bias, sizes(), take, seen=0)
    first, *computed = asked  # the first call asks for shapes alone
    assert counts.sum() <= sum(computed) < counts.sum() + counts.size * first
    assert sum(computed) < counts.size * SLOTS.shape[1]


@pytest.mark.optimized
@pytest.mark.parametrize(("unstacked", "most"), [(False, 0.29), pytest.param(True, 0.57, marks=pytest.mark.slow)])
def test_a_quarter_of_the_keys_takes_a_quarter_of_the_memory(unstacked, most):
    """Beside it room and slices of one layer in a scan, and of all layers where XLA has them apart."""
    cfg = dataclasses.replace(CFG, head_dim=64, layers=8 if unstacked else 28)  # of small heads the scores would count
    length, params = 2048, decoder.abstract(cfg, jnp.float32)
    shape = (cfg.layers, 2, length, cfg.kv_heads, cfg.head_dim)
    values = jax.ShapeDtypeStruct(shape, jnp.float32)
    marks, mask = jax.ShapeDtypeStruct(shape[:-1], jnp.float32), jax.ShapeDtypeStruct((2, length), jnp.bool_)
    whole = decoder.KVPrefix(values, values, mask, marks)
    sampling, mode = decode.Sampling(NEW, (), unstacked=unstacked), decoder.Mode()

    def answer(params, cache):
        *begun, _ = decode.begin(params, cfg, ASKED[:2], mask=AFTER[:2], max_new_tokens=NEW, cache=cache, mode=mode)
        return decode.continue_generation(params, cfg, *begun, sampling=sampling, key=jax.random.key(0), mode=mode)

    def bytes_of(run, *given):
        found = jax.jit(run).lower(params, *given).compile().memory_analysis()
        return found.argument_size_in_bytes + found.temp_size_in_bytes

    def packed(size):
        heads = (size // 2, size - size // 2 + size // 2)  # unequal
        given = jax.eval_shape(lambda one: pack(cfg, one, (heads,) * cfg.layers, 0), whole)
        return bytes_of(lambda params, one: answer(params, kv_prefix.open_cache(params, cfg, 9, packed=one)), given)

    text = 2 * 4 * np.prod(shape)
    none = packed(0)
    cache = jax.eval_shape(lambda: decoder.empty_cache(cfg, 2, length + 9, jnp.float32))
    assert bytes_of(answer, cache) - none > 0.9 * text
    assert packed(length // 3) - none < most * text  # a quarter: a sixth of one head, a third of the other
