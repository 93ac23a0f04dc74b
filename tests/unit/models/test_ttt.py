"""lw_jax/models/ttt.py against itself cut up in every way it can be; tests/parity holds it to the authors' class."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core import tree
from lw_jax.core.precision import Precision
from lw_jax.models import ttt
from lw_jax.models.ttt import Mode, TTTConfig
from tests import tiny

pytestmark = pytest.mark.slow

SAME = 2e-5  # fp32 of unit size, sums in another order, over two layers
NARROW = 0.1  # bf16 factors beside fp32, of logits of size 2
GRADIENT = 2e-4  # relative to the largest value of a leaf's gradient
BASE = {"vocab": 37, "width": 30, "layers": 2, "heads": 3, "ffn": 41, "chunk": 5, "kernel": 3, "base_rate": 3.0}
MAMBA = {"pre_conv": True, "share_qk": True, "gate": True}
VARIANTS = {
    "linear transformer": TTTConfig(**BASE),
    "linear mamba": TTTConfig(**BASE, **MAMBA),
    "mlp mamba": TTTConfig(**BASE, **MAMBA, inner="mlp"),
}
BOTH = ("linear transformer", "mlp mamba")
BATCH, LENGTH = 2, 13  # two chunks and three tokens
SCAN = Mode(unroll=1)


@functools.cache
def make(cfg: TTTConfig) -> dict:
    """Returns weights of which none is as it starts, and a token factor that is clamped at 0."""
    rng = np.random.default_rng(5)
    shapes = jax.tree_util.tree_leaves_with_path(ttt.init(jax.random.key(0), cfg))
    found = []
    for path, leaf in shapes:
        one = path[-1].key.endswith("norm")
        scale = 0.25 if leaf.ndim >= 2 and leaf.shape[-1] >= 10 else 0.1
        found.append(jnp.asarray(one + scale * rng.normal(size=leaf.shape), jnp.float32))
    params = jax.tree.unflatten(jax.tree.structure(ttt.abstract(cfg)), found)
    params["layers"]["token"] = params["layers"]["token"].at[:, 2].set(-0.6)  # 1/3 - 0.6 is below 0
    return params


def text(length: int = LENGTH, rows: int = BATCH, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, BASE["vocab"], (rows, length)), jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 3))
def logits(params: dict, cfg: TTTConfig, ids: jax.Array, mode: Mode = SCAN) -> jax.Array:
    return ttt.logits(params, cfg, ttt.forward(params, cfg, ids, mode=mode).hidden)


@functools.partial(jax.jit, static_argnames=("cfg", "mode"))
def forward(params: dict, cfg: TTTConfig, ids: jax.Array, mode: Mode = SCAN, **more: jax.Array) -> ttt.Output:
    return ttt.forward(params, cfg, ids, mode=mode, **more)


def cross_entropy(params: dict, cfg: TTTConfig, ids: jax.Array, mode: Mode) -> jax.Array:
    logp = jax.nn.log_softmax(logits(params, cfg, ids, mode)[:, :-1], axis=-1)
    return -jnp.mean(jnp.take_along_axis(logp, ids[:, 1:, None], axis=2))


graded = jax.jit(jax.value_and_grad(cross_entropy), static_argnums=(1, 3))


def test_a_step_on_a_token_lowers_the_inner_loss_of_a_model_that_has_learned_nothing():
    for inner, rate in (("linear", 1.0), ("mlp", 0.1)):
        cfg = TTTConfig(vocab=37, width=64, layers=2, heads=2, ffn=41, inner=inner, base_rate=rate)
        params = ttt.init(jax.random.key(1), cfg)
        losses = forward(params, cfg, text(64, seed=3), Mode(measured=True, unroll=1)).losses
        first, before, after = losses.mean(axis=(0, 1, 2, 3))
        assert after < before < first
        np.testing.assert_array_equal(losses[:, 0, ..., 0], losses[:, 0, ..., 1], "nothing is learned before")


# --- the same numbers however they are computed ---

MODES = {
    "recomputed": Mode(remat="full"),
    "partly unrolled, products kept": Mode(unroll=2, remat="dots"),
    "measured, recomputed": Mode(measured=True, remat="full", unroll=1),
}


@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_do_not_depend_on_how_the_model_is_run(mode):
    cfg = VARIANTS["mlp mamba"]
    loss, gradients = graded(make(cfg), cfg, text(), MODES[mode])
    wanted, expected = graded(make(cfg), cfg, text(), SCAN)
    np.testing.assert_allclose(loss, wanted, rtol=SAME)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected)), "a gradient that is 0 proves nothing"
    tiny.assert_near_trees(gradients, expected, GRADIENT)


def test_rate_multiplies_each_rows_inner_rate():
    cfg = VARIANTS["linear mamba"]
    twice = TTTConfig(**BASE | {"base_rate": 6.0}, **MAMBA)
    params, rate = make(cfg), jnp.asarray([2.0, 1.0])
    found = ttt.logits(params, cfg, forward(params, cfg, text(), rate=rate).hidden)
    for row, own in enumerate((twice, cfg)):
        np.testing.assert_allclose(found[row], logits(params, own, text())[row], atol=SAME)
    assert np.abs(found[0] - logits(params, cfg, text())[0]).max() > 100 * SAME
    still = forward(params, cfg, text(), Mode(measured=True, unroll=1), rate=jnp.zeros(BATCH)).losses
    np.testing.assert_array_equal(still[..., 0], still[..., 2])


# --- going on ---


@pytest.mark.parametrize("name", BOTH)
def test_prompts_of_any_length_then_token_after_token_are_the_whole_text(name):
    cfg, lengths = VARIANTS[name], np.asarray([1, 4, 5, 7, 10])
    params, ids = make(cfg), text(LENGTH + 4, rows=len(lengths))
    whole = logits(params, cfg, ids)
    rows = np.arange(len(lengths))
    prompt = np.where(np.arange(10) < lengths[:, None], ids[:, :10], 0)  # what stands behind must not be read
    prompt = np.pad(prompt, ((0, 0), (0, ids.shape[1] - 10)))
    out = forward(params, cfg, jnp.asarray(prompt, jnp.int32), lengths=jnp.asarray(lengths, jnp.int32))
    found = np.asarray(ttt.logits(params, cfg, out.hidden))[rows, lengths - 1]
    np.testing.assert_allclose(found, np.asarray(whole)[rows, lengths - 1], atol=SAME)
    step, cache = jax.jit(lambda token, cache: ttt.decode(params, cfg, token, cache)), out.cache
    for i in range(7):  # over a chunk's end in every row
        hidden, cache = step(ids[rows, lengths + i], cache)
        found = ttt.logits(params, cfg, hidden[:, None])[:, 0]
        np.testing.assert_allclose(found, np.asarray(whole)[rows, lengths + i], atol=SAME)
    assert cache.seen.tolist() == (lengths + 7).tolist()
    wanted = forward(params, cfg, ids, lengths=jnp.asarray(lengths + 7, jnp.int32)).cache.memory
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=SAME), cache.memory, wanted)


def test_several_texts_continue_token_after_token_in_bf16():
    cfg, mode = VARIANTS["mlp mamba"], Mode(precision=Precision("bfloat16", "float32"))
    params, ids = make(cfg), text(LENGTH + 1, rows=2)
    cache = forward(params, cfg, ids[:, :LENGTH], mode, lengths=jnp.full(2, LENGTH, jnp.int32)).cache
    hidden, _ = jax.jit(lambda token, cache: ttt.decode(params, cfg, token, cache, mode=mode))(ids[:, LENGTH], cache)
    found = ttt.logits(params, cfg, hidden[:, None])[:, 0]
    np.testing.assert_allclose(found, logits(params, cfg, ids)[:, LENGTH], atol=NARROW)


@pytest.mark.parametrize("name", BOTH)
def test_memory_handed_on_at_whole_chunks_makes_pieces_one_text(name):
    cfg = VARIANTS[name]
    params, ids = make(cfg), text(20)
    memory, found = ttt.beginning(params, cfg, BATCH, jnp.float32), []
    for piece in (ids[:, :10], ids[:, 10:]):
        out = forward(params, cfg, piece, memory=memory)
        memory = out.cache.memory
        found.append(out.hidden)
    whole = forward(params, cfg, ids, lengths=jnp.full(BATCH, 20, jnp.int32))
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole.hidden, atol=SAME)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=SAME), memory, whole.cache.memory)
    forgotten = forward(params, cfg, ids[:, 10:], memory=ttt.beginning(params, cfg, BATCH, jnp.float32)).hidden
    assert float(jnp.abs(forgotten - found[-1]).max()) > 100 * SAME, "memory must matter"


# --- parameters ---


def test_rows_of_the_table_that_are_no_token_have_no_part_in_anything():
    cfg = VARIANTS["linear transformer"]
    wide = TTTConfig(**BASE, rows=43)
    params = make(cfg)
    padded = params | {"embed": jnp.concatenate([params["embed"], jnp.full((6, 30), 7.0)])}
    assert ttt.abstract(wide)["embed"].shape == (43, 30)
    found = logits(padded, wide, text())
    assert found.shape[-1] == BASE["vocab"]
    np.testing.assert_allclose(found, logits(params, cfg, text()), atol=SAME)
    gradient = graded(padded, wide, text(), SCAN)[1]["embed"]
    assert np.any(gradient[:37]) and not np.any(gradient[37:])
    np.testing.assert_array_equal(ttt.fill_tables(wide, params)["embed"], padded["embed"].at[37:].set(0.0))
    drawn = ttt.init(jax.random.key(0), wide)["embed"]
    assert np.all(np.any(drawn[:37], axis=1)) and not np.any(drawn[37:])


def test_weights_start_as_the_authors_do():
    cfg = TTTConfig(vocab=101, width=60, layers=3, heads=2, ffn=97, inner="mlp", tied=False, **MAMBA)
    found = tree.flatten_paths(ttt.init(jax.random.key(3), cfg))
    assert {path: leaf.shape for path, leaf in found.items()} == {
        path: leaf.shape for path, leaf in tree.flatten_paths(ttt.abstract(cfg)).items()
    }
    ones = {"norm", *(f"layers/{name}_norm" for name in ("seq", "ffn", "post", "inner", "before"))}
    zeros = {*(f"layers/{name}" for name in ("post_norm_bias", "inner_norm_bias", "rate_bias", "token", "b1", "b2"))}
    uniform = {f"layers/{name}_conv{bias}" for name in ("before", "q", "k") for bias in ("", "_bias")}
    assert ones | zeros | uniform < found.keys()
    for path, leaf in found.items():
        if path in ones or path in zeros:
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, path in ones))
        elif path in uniform:
            assert 0.4 < float(jnp.abs(leaf).max()) <= 0.5 and abs(float(leaf.std()) - 0.5 / 3**0.5) < 0.03, path
        else:
            assert abs(float(leaf.std()) - 0.02) < 0.003 and abs(float(leaf.mean())) < 0.004, path
    assert len({float(leaf.ravel()[0]) for path, leaf in found.items() if path not in ones | zeros}) == len(
        found.keys() - ones - zeros
    ), "no two leaves are drawn alike"


# columns: linear with Llama-2's vocabulary; with GPT-2's linear, mlp, linear in the Mamba backbone
COUNTS = {
    "ttt_125m": (110_276_688, 124_298_064, 128_463_696, 124_445_520),
    "ttt_350m": (337_291_008, 355_986_176, 367_094_528, 356_379_392),
    "ttt_760m": (733_018_368, 761_061_120, 785_981_184, 761_650_944),
    "ttt_1b": (1_284_852_864, 1_322_243_200, 1_344_459_904, 1_323_029_632),
}
COLUMNS = ({"vocab": 32000}, {}, {"inner": "mlp"}, {"backbone": "mamba"})


@pytest.mark.parametrize("name", COUNTS)
def test_configured_models_have_exactly_the_authors_numbers_of_parameters(name):
    from lw_jax.recipes.ttt import _model

    spec = importlib.import_module(f"configs.ttt.{name}").get_config()
    assert spec.ttt.table_multiple == 128
    for count, changes in zip(COUNTS[name], COLUMNS, strict=True):
        own = spec.copy_and_resolve_references()
        own.ttt.update(table_multiple=1, **changes)
        assert tree.count(ttt.abstract(_model(own, own.ttt.vocab))) == count
    padded = _model(spec, 50257)
    assert (padded.vocab, padded.rows) == (50257, 50304)
    assert tree.count(ttt.abstract(padded)) == COUNTS[name][1] + 47 * padded.width
