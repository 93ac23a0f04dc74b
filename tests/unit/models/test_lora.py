"""lw_jax/models/lora.py: pairs beside matrices equal matrices with the pairs added in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.models import decoder, lora, projections, quant
from tests import tiny

CFG = dataclasses.replace(tiny.DECODER, vocab=101, width=64, heads=4, head_dim=16, ffn=192)
ALL = tuple(lora.MODULES)
SAME = 2e-5  # fp32 logits of unit size: the same sums in another order
IDS = np.random.default_rng(0).integers(0, 101, (2, 11))


def spec(names=ALL, dropout=0.0):
    return lora.Lora(rank=5, alpha=7.0, dropout=dropout, names=names)


def drawn(one, scale=0.3):
    """Pairs that do something: `b` is not zero."""
    shapes = lora.abstract(CFG, one)
    leaves, treedef = jax.tree.flatten(shapes)
    rng = np.random.default_rng(3)
    return treedef.unflatten([jnp.asarray(scale * rng.standard_normal(x.shape), jnp.float32) for x in leaves])


@pytest.fixture(scope="module")
def params():
    return decoder.init(jax.random.key(1), CFG, jnp.float32, scale=0.15)


def keys(seed):
    """A key for each row."""
    return jax.random.split(jax.random.key(seed), len(IDS))


@functools.partial(jax.jit, static_argnames="mode")
def logits(params, mode=decoder.Mode()):
    x = decoder.embed(params, jnp.asarray(IDS))
    return decoder.logits(params, decoder.forward(params, CFG, x, mask=jnp.ones(IDS.shape, bool), mode=mode).hidden)


@pytest.mark.parametrize("names", [ALL, ("o",)])
def test_pairs_beside_matrices_equal_their_sum_merged_in(params, names):
    one, pairs = spec(names), drawn(spec(names))
    beside = logits(lora.attach(params, pairs, one))
    merged = lora.merge(jax.tree.map(jnp.copy, params), pairs, one)
    assert float(jnp.abs(beside - logits(params)).max()) > 0.1, "the pairs change something"
    np.testing.assert_allclose(beside, logits(merged), atol=SAME * float(jnp.abs(beside).max()))
    for name in set(ALL) - set(names):
        np.testing.assert_array_equal(merged["layers"][name], params["layers"][name])


@pytest.mark.parametrize("packed", ["", "nf4"])
def test_new_pairs_change_no_bit(params, packed):
    if packed:
        layers = dict(params["layers"])
        for name in quant.MATRICES:
            shape = quant.inputs_last(name, layers[name].shape)
            layers[name] = quant.pack(layers[name].reshape(shape), packed)
        params = params | {"layers": layers}
    pairs = lora.init(jax.random.key(2), CFG, spec())
    np.testing.assert_array_equal(logits(lora.attach(params, pairs, spec())), logits(params))
    for name, pair in pairs["layers"].items():
        inputs = np.prod(pair["a"].shape[2:])
        assert not pair["b"].any() and float(jnp.abs(pair["a"]).max()) <= inputs**-0.5, name
        assert float(jnp.std(pair["a"])) == pytest.approx((3 * inputs) ** -0.5, rel=0.1), "uniform, as PEFT draws it"


@pytest.mark.parametrize("remat", ["none", "full"])
def test_dropout_is_of_the_pairs_inputs_alone_drawn_by_its_key_and_off_outside_training(params, remat):
    one, pairs, mode = spec(dropout=0.4), drawn(spec()), decoder.Mode(remat=remat)
    plain = logits(lora.attach(params, pairs, one), mode)
    runs = [logits(lora.attach(params, pairs, one, keys=keys(seed)), mode) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert float(jnp.abs(runs[0] - runs[2]).max()) > 0.01 and float(jnp.abs(runs[0] - plain).max()) > 0.01
    still = lora.attach(params, pairs, one, keys=keys(1), training=jnp.float32(0))
    np.testing.assert_allclose(logits(still, mode), plain, atol=SAME * float(jnp.abs(plain).max()))
    empty = lora.attach(params, lora.init(jax.random.key(2), CFG, one), one, keys=keys(1))
    np.testing.assert_array_equal(logits(empty, mode), logits(params, mode))


def test_what_dropout_keeps_is_divided_by_the_rate_itself_in_bf16():
    x = jax.random.normal(jax.random.key(0), (2, 11, 7), jnp.bfloat16)
    kept = projections._drop(x, {"dropout": jnp.float32(0.05), "keys": jax.random.key_data(keys(1))})
    whole = (np.asarray(x, np.float32) / np.float32(0.95)).astype(x.dtype)
    np.testing.assert_array_equal(kept, np.where(kept == 0, 0, whole))
    assert 0 < (np.asarray(kept) == 0).sum() < x.size / 2


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("q_proj", "v_proj"), ("q", "v")),
        ((".*_proj",), ALL),
        (("mlp\\..*",), ("gate", "up", "down")),
        (("down_proj", "self_attn.o_proj"), ("o", "down")),
    ],
)
def test_targets_are_regexes_over_module_names(targets, names):
    assert lora.make(rank=2, dropout=0.0, targets=targets).names == names


@pytest.mark.parametrize(
    ("target", "told"), [("qkv_proj", "'qkv_proj' matches no matrix"), ("q_pro", "mean 'q_proj'"), ("q(", "no regular")]
)
def test_target_that_matches_nothing_is_refused_by_name(target, told):
    with pytest.raises(UserError, match=told):
        lora.make(rank=2, dropout=0.0, targets=("k_proj", target))
