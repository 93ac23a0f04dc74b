"""lw_jax/recipes/ttt.py: the loss and what is told beside it, against plain computations, and where a run begins."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax import recipes
from lw_jax.core import tree
from lw_jax.core.errors import UserError
from lw_jax.data.tokens import byte_backend, load_tokenizer
from lw_jax.hub import weights
from lw_jax.models import ttt
from lw_jax.recipes.ttt import TTT
from lw_jax.training import trainer
from tests import tiny

pytestmark = pytest.mark.slow

SAME = 2e-5  # fp32 sums in another order
GRADIENT = 2e-4  # relative to the largest value of a leaf's gradient


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ttt")


@pytest.fixture(scope="module")
def recipe(root):
    return tiny.make_ttt(root)


@pytest.fixture(scope="module")
def params(recipe):
    """Weights that say something: those of a new model say the same of every token."""
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda leaf: leaf + 0.2 * rng.normal(size=leaf.shape).astype(np.float32), recipe.build().trainable
    )


@pytest.fixture(scope="module")
def batch(recipe):
    return recipe.data_schedule().batch(5, global_batch=4, seed=3, share=slice(0, 4))


def on_devices(batch):
    return jax.tree.map(jnp.asarray, batch)


def terms_of(recipe, params, batch):
    return jax.jit(lambda params, batch: recipe.loss(params, {"lm": {}}, batch, jax.random.key(0)))(
        params, on_devices(batch)
    )


def mean_of(recipe, params, batch):
    terms = recipe.loss(params, {"lm": {}}, on_devices(batch), jax.random.key(0))
    return terms.sum / terms.weight


def each_nll(recipe, params, ids, rate=None):
    """Cross-entropy of every target, by the book."""
    logits = ttt.logits(params, recipe.model, ttt.forward(params, recipe.model, ids[:, :-1], rate=rate).hidden)
    return -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(ids)[:, 1:, None], axis=2)[..., 0]


# --- the loss ---


def test_loss_is_the_cross_entropy_of_every_token_after_the_first(recipe, params, batch):
    fields = batch["readers"]["lm"]
    assert fields["ids"].shape == (4, 13)
    terms = terms_of(recipe, params, batch)
    wanted = each_nll(recipe, params, jnp.asarray(fields["ids"]))
    assert wanted.std() > 0.5, "too flat to compare"
    assert float(terms.weight) == 4 * 12 and terms.terms == {}
    assert float(terms.sum) == pytest.approx(wanted.sum(), rel=SAME)


def test_inner_rate_of_the_course_reaches_the_model(root):
    paced = tiny.make_ttt(root, optim__warmup_steps=4, ttt__inner="mlp")
    params, data_schedule = paced.build().trainable, paced.data_schedule()
    for number, rate in ((0, 0.1), (2, 0.55), (4, 1.0), (9, 1.0)):
        batch = data_schedule.batch(number, global_batch=4, seed=3, share=slice(0, 4))
        np.testing.assert_allclose(batch["readers"]["lm"]["rate"], rate, rtol=1e-6)
        if rate == 0.55:
            wanted = each_nll(paced, params, jnp.asarray(batch["readers"]["lm"]["ids"]), jnp.full(4, rate)).mean()
            assert float(mean_of(paced, params, batch)) == pytest.approx(wanted, rel=SAME)


def measured(recipe, indices):
    return recipe.validation()[0][1].collate(indices)


def test_measured_terms_add_up_to_the_loss(recipe, params):
    batch = measured(recipe, [0, 3, 7])
    terms = terms_of(recipe, params, batch)
    each = each_nll(recipe, params, jnp.asarray(batch["readers"]["lm"]["ids"]))
    assert float(terms.sum) == pytest.approx(each.sum(), rel=SAME)
    told = {name: (float(pair[0]), float(pair[1])) for name, pair in terms.terms.items()}
    ranges = {"1-1": (0, 1), "2-2": (1, 2), "3-4": (2, 4), "5-8": (4, 8), "9-12": (8, 12)}
    assert {name for name in told if name.startswith("detail/")} == {f"detail/position/{name}" for name in ranges}
    for name, (first, last) in ranges.items():
        assert told[f"detail/position/{name}"] == pytest.approx(
            (each[:, first:last].sum(), 3 * (last - first)), rel=SAME
        )
    positions = [pair for name, pair in told.items() if name.startswith("detail/position/")]
    assert sum(pair[0] for pair in positions) == pytest.approx(float(terms.sum), rel=SAME)
    assert sum(pair[1] for pair in positions) == float(terms.weight) == 36


def test_validation_of_a_run_is_the_mean_over_all_held_out_tokens(root, params):
    recipe = tiny.make_ttt(root, devices=4, eval__examples=0, eval__batch=8)
    run = trainer.Run(recipe.cfg, recipe, None, None)
    run.state = {"trainable": jax.device_put(jax.device_get(params), recipe.shardings.trainable)}
    windows = recipe.validation()[0][1]
    assert len(windows) % 8, "the last batch must be filled up"
    found = run.validation_loop.measure(run.state["trainable"], {"lm": {}})
    ids = jnp.asarray(windows.collate(range(len(windows)))["readers"]["lm"]["ids"])
    assert found["loss"] == pytest.approx(each_nll(recipe, params, ids).mean(), rel=SAME)
    assert {"nll/unigram", "nll/bigram", "inner/first", "inner/before", "inner/after"} < found.keys()
    assert found["nll/bigram"] < found["nll/unigram"] < np.log(257)


@pytest.mark.parametrize(("last", "tokens"), [(1000, 1 << 26), (2000, 5400)], ids=["the end", "not all is counted"])
def test_baselines_are_of_all_parts_of_the_training_text(tmp_path, monkeypatch, last, tokens):
    monkeypatch.setattr("lw_jax.recipes.ttt.BASELINE_TOKENS", tokens)
    (tmp_path / "parts.txt").write_text("ab" * (6000 - last) + "cd" * last)
    ((_, windows),) = tiny.make_ttt(tmp_path, data__train=str(tmp_path / "parts.txt")).validation()
    fields = windows.collate([0, 1])["readers"]["lm"]
    assert fields["ids"].min() == ord("c") and (fields["bigram"] / windows.length < 0.1).all(), fields["bigram"]


# --- the same however it is computed ---

WAYS = {
    "chunked loss": {"compute__logits_chunk": 20},  # 5 positions of 4 rows, which do not divide 12
    "wider table, chunked": {"ttt__table_multiple": 64, "compute__logits_chunk": 1000},
}


@pytest.mark.parametrize("name", WAYS)
def test_loss_and_gradients_are_the_same_however_they_are_computed(name, root, recipe, params, batch):
    own = tiny.make_ttt(root, **WAYS[name])
    assert own.model.rows == (320 if "table" in name else 0)
    filled = ttt.fill_tables(own.model, params)
    loss, gradients = jax.jit(jax.value_and_grad(lambda p: mean_of(own, p, batch)))(filled)
    wanted, expected = jax.jit(jax.value_and_grad(lambda p: mean_of(recipe, p, batch)))(params)
    assert float(loss) == pytest.approx(float(wanted), rel=SAME)
    tiny.assert_near_trees(gradients, ttt.fill_tables(own.model, expected), GRADIENT)


# --- segments ---


def test_segments_are_one_text_in_values_and_stop_the_gradient_between(root, recipe, params):
    pieces = tiny.make_ttt(root, ttt__segments=2)
    whole = tiny.make_ttt(root, ttt__length=24)
    assert pieces.unit == whole.unit == ("tokens", 24)
    batch = pieces.data_schedule().batch(2, global_batch=4, seed=3, share=slice(0, 4))
    ids = jnp.asarray(batch["readers"]["lm"]["ids"])
    assert ids.shape == (4, 25)
    loss, gradients = jax.jit(jax.value_and_grad(lambda p: mean_of(pieces, p, batch)))(params)
    assert float(loss) == pytest.approx(float(mean_of(whole, params, batch)), rel=SAME)

    def by_hand(params):
        """The second half's memory is a constant: it is that of the same weights, which are not asked."""
        read = ttt.forward(jax.lax.stop_gradient(params), recipe.model, ids[:, :12], lengths=jnp.full(4, 12))
        parts = [
            ttt.forward(params, recipe.model, ids[:, :12]).hidden,
            ttt.forward(params, recipe.model, ids[:, 12:24], memory=read.cache.memory).hidden,
        ]
        logp = jax.nn.log_softmax(ttt.logits(params, recipe.model, jnp.concatenate(parts, axis=1)))
        return -jnp.mean(jnp.take_along_axis(logp, ids[:, 1:, None], axis=2))

    wanted, expected = jax.jit(jax.value_and_grad(by_hand))(params)
    assert float(loss) == pytest.approx(float(wanted), rel=SAME)
    tiny.assert_near_trees(gradients, expected, GRADIENT)
    through = jax.jit(jax.grad(lambda p: mean_of(whole, p, batch)))(params)
    gap = jnp.abs(through["layers"]["w1"] - expected["layers"]["w1"]).max() / jnp.abs(expected["layers"]["w1"]).max()
    assert float(gap) > 10 * GRADIENT, "the cut must matter"
    told = terms_of(pieces, params, measured(pieces, [0, 1])), terms_of(whole, params, measured(whole, [0, 1]))
    assert float(told[0].sum) == pytest.approx(float(told[1].sum), rel=SAME)


# --- text ---


def test_validation_reads_the_source_that_is_named_for_it(root, tmp_path):
    other = tmp_path / "other" / "a.txt"
    other.parent.mkdir()
    other.write_text("Some other words, seen nowhere before. " * 3)
    windows = tiny.make_ttt(root, data__validation=str(other.parent)).validation()[0][1]
    assert len(windows) == 3 * 39 // 12
    found = [bytes(ids[ids < 256].tolist()) for ids in windows.collate(range(len(windows)))["readers"]["lm"]["ids"]]
    assert all(one in b"Some other words, seen nowhere before. " * 3 for one in found)


def test_text_without_a_window_is_refused(root, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UserError, match=r"short.txt: 10 tokens"):
        tiny.make_ttt(root, data__validation=str(short)).validation()
    with pytest.raises(UserError, match=r"short.txt: 10 tokens"):
        tiny.make_ttt(root, data__train=str(short), data__validation=str(tiny.write_text(tmp_path))).data_schedule()


def test_vocabulary_is_the_tokenizers(root):
    folder = str(tiny.readers(root)["llama"])
    found = tiny.make_ttt(root, ttt__tokenizer=folder)
    assert found.model.vocab == load_tokenizer(tiny.readers(root)["llama"]).vocab == 352
    assert tiny.make_ttt(root, ttt__tokenizer=folder, ttt__vocab=352).model == found.model
    with pytest.raises(UserError, match=r"config.ttt.vocab = 351.*352"):
        tiny.make_ttt(root, ttt__tokenizer=folder, ttt__vocab=351)


def test_plan_needs_neither_text_nor_tokenizer_where_the_vocabulary_is_named(root):
    cfg = tiny.make_ttt_config(
        root, data__train="/not/there", ttt__tokenizer="nobody/nothing", ttt__vocab=999, ttt__segments=3
    )
    outline = TTT(cfg, tiny.place(cfg, "replicate", devices=2), outline=True)
    assert outline.model.vocab == 999 and recipes.reader_bytes(cfg) == {"lm": 0}
    widths = outline.batch_widths()["readers"]["lm"]
    assert widths["ids"].shape == (37,) and outline.unit == ("tokens", 36)


# --- where weights begin and lie ---


@pytest.fixture
def source(tmp_path, recipe, params):
    weights.save_ttt(tmp_path / "source", params, recipe.model)
    return tmp_path / "source"


def test_training_goes_on_from_a_folder(root, source, params):
    found = tiny.make_ttt(root, devices=4, strategy="fsdp", ttt__source=str(source), ttt__table_multiple=64)
    built = found.build().trainable
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(built), ttt.fill_tables(found.model, params))
    assert built["embed"].shape == (320, 24)
    for (path, leaf), at in zip(
        tree.flatten_paths(built).items(), jax.tree.leaves(found.shardings.trainable), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(at, leaf.ndim), path


def test_folder_of_another_shape_is_refused(root, source):
    with pytest.raises(UserError, match=r"config.ttt.source = .*source' is .*width=24.*describes .*width=48"):
        tiny.make_ttt(root, ttt__source=str(source), ttt__width=48).build()


def test_weights_of_another_tokenizer_are_refused(root, source):
    byte_backend().save_pretrained(str(source))
    tiny.make_ttt(root, ttt__source=str(source)).build()
    file = source / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"config.ttt.source = .* another tokenizer than config.ttt.tokenizer = 'bytes'"
    ):
        tiny.make_ttt(root, ttt__source=str(source)).build()
