"""lw_jax/recipes/latentwire.py: what learns when, what is not even differentiated, how latents are sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lw_jax.core import tree
from lw_jax.core.errors import UserError
from lw_jax.core.types import EXACT, Example
from lw_jax.data.examples import spread
from lw_jax.data.tokens import byte_backend, wrap
from lw_jax.models import codec
from lw_jax.recipes import kv_start, latentwire
from lw_jax.training import optimizers, trainer, validation_loop
from sharding.rules import path_of
from tests import tiny

SAME = 2e-5  # fp32 values of unit size: the same sums in another order
STAGES = {"stages__align__share": 0.5}


@pytest.fixture(scope="module")
def bodies(root, tmp_path_factory):
    """encoder.kind -> the keys that name its body."""
    folder = tmp_path_factory.mktemp("bert")
    tiny.write_bert(folder)
    lm = {"encoder__source": str(tiny.readers(root)["qwen"])}
    bert = {"encoder__source": str(folder), "encoder__window": 61, "encoder__windows": 5, "encoder__layers": 2}
    return {"lm": lm, "bert": bert, "bytes": {}}


@pytest.mark.parametrize(("kind", "rank", "part", "rate"), [
    ("lm", 0, "body", 0.3), ("lm", 3, "lora", 0.3), ("bytes", 0, "body", 1.0)
])  # fmt: skip
def test_what_is_pretrained_has_its_own_rate_in_each_stage_and_a_new_body_that_of_its_head(
    root, bodies, kind, rank, part, rate
):
    recipe = tiny.make_recipe(root, encoder__kind=kind, encoder__rank=rank, **bodies[kind], **STAGES)
    rates = dict(recipe.rates)
    assert rates[f"encoder/{part}/.*"] == pytest.approx((0.0, rate))
    assert rates["encoder/head/.*"] == (0.0, 1.0)
    assert rates["adapters/.*"] == 1.0
    batch = recipe.data_schedule().batch(0, global_batch=8, seed=0, share=slice(0, 8))
    assert batch["source"]["frozen"].parts == (part, "head")


def test_a_frozen_body_is_not_counted_among_the_trainable_parameters(root, bodies, capsys):
    recipe = tiny.make_recipe(root, encoder__kind="lm", encoder__rate=0.0, **bodies["lm"])
    trainer.Run(recipe.cfg, recipe, None, None).prepare()
    shapes = recipe.abstract.trainable
    count = tree.count(shapes) - tree.count(shapes["encoder"]["body"])
    assert f"; {count:,} trainable parameters;" in capsys.readouterr().out


def work(recipe, batch):
    """(FLOPs of the latents' gradient as compiled, the gradient)."""
    trainable = jax.eval_shape(lambda: recipe.abstract.trainable)
    drawn = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1, leaf.dtype), trainable)

    def loss(trainable):
        return jnp.sum(jnp.sin(recipe.share(trainable, batch["source"], jax.random.key(0))))

    compiled = jax.jit(jax.grad(loss)).lower(drawn).compile()
    return compiled.cost_analysis()["flops"], compiled(drawn)


@pytest.mark.slow
@pytest.mark.optimized
def test_frozen_body_costs_no_gradient(root, bodies):
    kind, flops, gradients = "bert", {}, {}
    for rate in (0.3, 0.0):
        recipe = tiny.make_recipe(root, encoder__kind=kind, encoder__rate=rate, **bodies[kind])
        batch = jax.tree.map(jnp.asarray, recipe.data("validation").collate(range(3)))
        flops[rate], gradients[rate] = work(recipe, batch)
    assert flops[0.0] < 0.6 * flops[0.3], "backward is twice the forward pass, of which a third is left"
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients[0.0]["encoder"]["body"]))
    for part in ("mix", "project"):  # the head learns as ever
        heads = [gradients[rate]["encoder"]["head"][part] for rate in (0.0, 0.3)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=SAME), *heads)


def test_stage_of_adapters_alone_has_no_gradient_of_the_encoder_in_step_norm_or_moments(root):
    recipe = tiny.make_recipe(root, only="llama", **STAGES, train__steps=4, optim__clip_norm=1e9)
    data_schedule = recipe.data_schedule()
    rows = data_schedule.batch(0, global_batch=8, seed=0, share=slice(0, 8))
    program, state, frozen, batch = tiny.start_step(recipe, rows)
    (later,) = (one for one in data_schedule.shapes() if one["readers"]["llama"]["task"].name == "answer")
    assert "frozen" not in later["source"], "what is planned is the stage that trains all"

    def lower(batch):
        (part,) = program.step.lower(state, frozen, batch).values()
        return part.lowered

    whole = batch | {"source": {key: leaf for key, leaf in batch["source"].items() if key != "frozen"}}
    align = lower(batch)
    saved = lower(whole).cost_analysis()["flops"] - align.cost_analysis()["flops"]

    def latents(trainable):
        return jnp.sum(recipe.share(trainable, jax.tree.map(lambda leaf: leaf[0], whole["source"]), jax.random.key(0)))

    forward = jax.jit(latents).lower(state["trainable"]).cost_analysis()["flops"]
    assert saved > 1.8 * forward, "the backward pass, twice the forward one, is not in the step"

    before = jax.tree.map(np.asarray, state["trainable"]["encoder"])
    state, values = align.compile()(state, frozen, batch)
    jax.tree.map(np.testing.assert_array_equal, state["trainable"]["encoder"], before)
    found = [(path_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state["opt_state"])]
    moments = [leaf for path, leaf in found if "encoder/" in path]
    assert moments and not any(np.asarray(leaf).any() for leaf in moments)
    first = [leaf for path, leaf in found if "/mu/adapters/" in path]
    norm = float(optax.tree.norm(first)) / (1 - optimizers.B1)
    assert float(values["grad_norm"]) == pytest.approx(norm, rel=1e-4) != 0.0


def test_latents_go_through_the_channel_that_their_stage_draws(root):
    plain, sent = (
        tiny.make_recipe(root, only="llama", **changes) for changes in ({}, {"stages__answer__bits": (EXACT, 4)})
    )
    trainable = plain.build().trainable
    batch = jax.tree.map(jnp.asarray, plain.data("validation").collate(range(3)))
    channel = jnp.asarray([[5, 24, EXACT], [5, 24, 4], [2, 24, 4]], jnp.int32)
    source = batch["source"] | {"channel": channel}
    exact, coarse = (
        np.asarray(tiny.compiled(recipe.share, trainable, source, jax.random.key(0))) for recipe in (plain, sent)
    )
    np.testing.assert_allclose(coarse[0], exact[0], atol=SAME)
    for row, slots in ((1, 5), (2, 2)):
        as_read = codec.unpack(codec.pack(exact[row, :slots], bits=4, encoder="0" * 16), encoder="0" * 16)
        np.testing.assert_allclose(coarse[row, :slots], as_read, atol=1e-4)  # the message's own rounding
        assert np.abs(coarse[row] - exact[row]).max() > 0.01 and not coarse[row, slots:].any()


def test_bert_body_s_window_beyond_its_positions_is_refused_with_the_remedy(root, bodies):
    with pytest.raises(UserError, match=r"encoder\.window=62.* 61 .*encoder\.windows"):
        tiny.make_recipe(root, encoder__kind="bert", **bodies["bert"] | {"encoder__window": 62})
    with pytest.raises(UserError, match=r"encoder\.layers=4.* 3 "):
        tiny.make_recipe(root, encoder__kind="bert", **bodies["bert"] | {"encoder__layers": 4})


def test_planned_batch_has_the_fields_of_a_real_one(root, monkeypatch, tmp_path):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    for changes in ({}, {"loss__kl": 1.0}, {"loss__kl": 1.0, "loss__teacher_k": 0}):
        recipe = tiny.make_recipe(root, only="qwen", data__cards=9, **changes)
        real = recipe.data_schedule().shapes()[0]
        planned = recipe.batch_widths()
        assert jax.tree.structure(planned) == jax.tree.structure(real), changes
        jax.tree.map(lambda a, b: (a.dtype == b.dtype and a.ndim == b.ndim) or pytest.fail(f"{a} {b}"), planned, real)


def test_evaluation_of_made_data_has_as_many_questions_as_it_asks_for(root):
    recipe = tiny.make_recipe(root, data__train="cards", data__validation="cards", data__validation_limit=0)
    assert [len(recipe.questions("validation", least=least)) for least in (8, 300)] == [256, 300]


def test_training_validates_as_many_examples_as_it_is_told_or_as_eval_does(root, monkeypatch):
    seen = []
    monkeypatch.setattr(validation_loop, "eval_batches", lambda encoded, size, limit, share: seen.append(limit) or [])
    for limit, examples in ((16, 8), (0, 8), (3, 8)):
        recipe = tiny.make_recipe(root, data__validation_limit=limit, eval__examples=examples)
        loop = trainer.Run(recipe.cfg, recipe, None, None).validation_loop
        loop.measure({}, {})
        assert set(seen) == {limit or examples}
        seen.clear()
        (told,) = loop.describe_data()  # of 256 cards, or those within the limit
        assert told.endswith(f"  {examples} of them are measured") == (not limit)


def test_an_aligned_start_finds_a_token_s_string_with_its_blank_whatever_sentencepiece_does_to_one_alone(sentencepiece):
    bytes_ = wrap(byte_backend())
    word, letter = sentencepiece.encode("a")[0], sentencepiece.encode("ba")[-1]  # at a word's beginning, and inside
    found = np.asarray(latentwire._match_pieces(sentencepiece, bytes_, sentencepiece.vocab))
    assert found[[word, letter]].tolist() == [[*b" a", -1, -1], [*b"a", -1, -1, -1]]
    found = np.asarray(latentwire._match_pieces(bytes_, sentencepiece, bytes_.vocab))
    assert found[ord("a")].tolist() == [letter, -1, -1, -1]
    found = np.asarray(latentwire._match_pieces(sentencepiece, sentencepiece, sentencepiece.vocab))
    assert found[[word, letter], 0].tolist() == [word, letter], "its own tokens are themselves"


@pytest.mark.parametrize("count", [600, 40])
def test_another_seed_takes_other_texts_for_a_start_and_seed_0_those_of_before(root, monkeypatch, count):
    found = [Example("", f"text {number}", "?", ("on",)) for number in range(count)]
    taken = []
    for seed in (0, 1, 0):
        recipe = tiny.make_recipe(root, seed=seed)
        monkeypatch.setattr(recipe.curriculum, "examples", lambda split: found)
        taken.append(recipe.start_texts)
    before = np.random.default_rng(0).permutation(spread(count, kv_start.TEXTS))
    assert taken[0] == taken[2] == [f"text {number}" for number in before]
    assert len(set(taken[1])) == len(taken[0]) == min(count, kv_start.TEXTS)
    assert taken[1][:8] != taken[0][:8], "a start may read the first ones alone"
    assert (set(taken[1]) != set(taken[0])) == (count > kv_start.TEXTS)
