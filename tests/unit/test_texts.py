"""Several questions of a text in one training example: what a batch holds, its loss, its curve, its plan."""

import dataclasses
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core import config, validation
from lw_jax.core.errors import UserError
from lw_jax.core.types import LossTerms
from lw_jax.data import question_cards
from lw_jax.data.batches import fill
from lw_jax.data.data_schedule import DataSchedule, Phase, example_shapes
from lw_jax.data.texts import Texts
from tests import tiny

LOSS = 1e-5  # relative, fp32: sums in another order
GRADIENT = 2e-4  # of the largest in a leaf, likewise; a gain's, one number, is a sum that cancels
PARAMETERS = 2e-4  # absolute; Adam divides by the root of small squares, which magnifies rounding
COUNTS = (3, 1, 2, 7, 3, 4, 1, 5, 2, 3, 6, 1)  # questions of each text
N = 3


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LW_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A file whose texts have so many questions each, those of one text not beside each other."""
    cards = question_cards.make(sum(COUNTS), facts=2, seed=0, split="train")
    texts = [i for turn in range(max(COUNTS)) for i, count in enumerate(COUNTS) if turn < count]
    rows = [
        {"context": cards[i].context, "question": card.question, "answers": list(card.answers)}
        for i, card in zip(texts, cards, strict=True)
    ]
    file = tmp_path_factory.mktemp("texts") / "rows.json"
    file.write_text(json.dumps(rows), "utf-8")
    return str(file)


@pytest.fixture(scope="module")
def make(root, source, cache):
    def recipe(**changes):
        return tiny.make_recipe(root, **{"data__train": source, "data__questions": N} | changes)

    return recipe


LM = {"encoder__kind": "lm", "encoder__layers": 1}


def training(recipe):
    (phase,) = recipe.data_schedule().phases
    ((stream, _),) = phase.streams
    return stream


@pytest.fixture(scope="module")
def texts(make):
    return training(make())


def test_each_question_is_in_one_example_with_others_of_its_text(texts):
    assert isinstance(texts, Texts) and sorted(sum(texts.groups, ())) == list(range(sum(COUNTS)))
    asked = texts.encoded.examples
    assert all(len({asked[position].context for position in group}) == 1 for group in texts.groups)
    assert Counter(map(len, texts.groups)) == {3: 7, 2: 7, 1: 3}, "7 are 3, 2 and 2; 4 are 2 and 2; 5 are 3 and 2"
    assert any(f"{len(COUNTS)} texts: {len(texts)} examples" in line for line in texts.describe())


def test_batch_has_a_row_a_text_and_its_questions_behind_it(texts):
    chosen = [4, 0, 1]
    batch = texts.collate(chosen)
    assert batch["index"].tolist() == chosen and batch["source"]["ids"].shape[0] == 3
    for row, number in enumerate(chosen):
        group = texts.groups[number]
        each = texts.encoded.collate(group)
        np.testing.assert_array_equal(batch["source"]["ids"][row], each["source"]["ids"][0])
        for name, fields in batch["readers"].items():
            own, alone = jax.tree.map(lambda leaf, row=row: leaf[row], fields), each["readers"][name]
            real = jax.tree.map(lambda leaf, group=group: leaf[: len(group)], own)
            jax.tree.map(np.testing.assert_array_equal, real, alone)
            assert not own["weights"][len(group) :].any() and own["after"]["mask"][:, -1].all()
    filled = fill(batch, 5)["readers"]["llama"]["weights"]
    assert filled.shape[:2] == (5, N) and not filled[3:].any() and filled[0].any()


def test_what_is_drawn_is_drawn_once_a_text(make, root):
    recipe = make(message__literals=2, encoder__source=str(tiny.readers(root)["llama"]), **LM)
    schedule = DataSchedule((Phase(1, ((training(recipe), 1.0),), slots=(2, 5), dropout=0.4),))
    whole = schedule.batch(3, global_batch=16, seed=0, share=slice(0, 16))
    for fields in whole["readers"].values():
        channel, words = fields["channel"], fields["literals"]["mask"]
        assert channel.shape == (16, N, 3) and (channel == channel[:, :1]).all()
        silent, wordless = channel[:, 0, 0] == 0, ~words.any(axis=2)
        assert (wordless == wordless[:, :1]).all() and silent.any() and wordless.any()
        np.testing.assert_array_equal(channel[~silent][:, 0], whole["source"]["channel"][~silent])
    halves = [schedule.batch(3, global_batch=16, seed=0, share=share) for share in (slice(0, 5), slice(5, 16))]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda *parts: np.concatenate(parts), *halves), whole)


KINDS = {
    "embeddings": {"loss__kl": 1.0, "loss__teacher_k": 7},
    "kv": {"adapter__kind": "kv", "loss__kl": 1.0, "loss__teacher_k": 0, "compute__logits_chunk": 32},
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_the_sum_over_single_questions(make, kind):
    recipe = make(**KINDS[kind])
    texts, built = training(recipe), recipe.build()
    chosen = [next(i for i, group in enumerate(texts.groups) if len(group) == size) for size in (3, 2, 1)]

    @jax.jit
    def run(trainable, batch):
        def objective(trainable):
            terms = recipe.loss(trainable, built.frozen, batch, jax.random.key(0))
            return terms.sum, terms

        return jax.grad(objective, has_aux=True)(trainable)

    found = run(built.trainable, jax.tree.map(jnp.asarray, texts.collate(chosen)))
    single = [
        run(built.trainable, jax.tree.map(jnp.asarray, texts.encoded.collate([position])))
        for number in chosen
        for position in texts.groups[number]
    ]
    assert len(single) == 6
    gradient, terms = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *single)
    assert isinstance(terms, LossTerms) and set(found[1].terms) >= {"nll/llama", "kl/qwen"}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=LOSS), found[1], terms)
    for one, other in zip(*map(jax.tree.leaves, (found[0], gradient)), strict=True):
        np.testing.assert_allclose(one, other, atol=GRADIENT * np.abs(other).max())


@pytest.fixture(scope="module")
def alone(make, tmp_path_factory):
    """(exit code, losses, weights) of one device."""
    return tiny.unsaved_curve(make(**CURVE), tmp_path_factory.mktemp("alone") / "run")


CURVE = {"adapter__kind": "kv", "loss__kl": 0.5, "stages__pretrain__share": 0.4, "stages__pretrain__lengths": (16,)}
PLACED = {
    "replicate 4": {"devices": 4},
    "split": {"devices": 2, "strategy": "split", "train__micro_batch": 2},
    "replicate 3 accumulate 2, with rows of filling": {"devices": 3, "train__micro_batch": 2},
    "data 2 x tensor 2": {"devices": 4, "model": 2, "strategy": "tensor"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (at > 1)) for at, one in enumerate(PLACED)]
)
def test_loss_curve_is_that_of_one_device(make, alone, name, tmp_path):
    code, losses, trainable = tiny.unsaved_curve(make(**CURVE, **PLACED[name]), tmp_path / "run")
    assert code == alone[0] == 0
    np.testing.assert_allclose(losses, alone[1], rtol=LOSS)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=PARAMETERS), trainable, alone[2])


def test_a_stopped_run_goes_on_bit_by_bit(make, alone, tmp_path):
    assert tiny.curve(make(**CURVE), tmp_path / "run", stop=lambda step: step == 4)[0] != 0
    code, losses, trainable = tiny.curve(make(**CURVE), tmp_path / "run")
    assert code == 0
    np.testing.assert_array_equal(losses, alone[1])
    jax.tree.map(np.testing.assert_array_equal, trainable, alone[2])


def test_planned_batch_has_the_fields_of_a_real_one_and_validation_one_question(make):
    for changes in ({}, {"loss__kl": 1.0}, {"loss__kl": 1.0, "loss__teacher_k": 0}):
        recipe = make(**changes)
        planned, real = recipe.batch_widths(), training(recipe).probe()
        assert jax.tree.structure(planned) == jax.tree.structure(real)
        jax.tree.map(
            lambda one, other: (one.dtype, one.ndim) == (other.dtype, other.ndim - 1) or pytest.fail(), planned, real
        )
        assert planned["readers"]["llama"]["targets"].shape == (N, 24)
        plain = make(data__questions=1, **changes)
        assert recipe.validation_widths() == plain.batch_widths() == plain.validation_widths()
    long = {"stages__pretrain__share": 0.5, "stages__pretrain__lengths": (48,)}
    assert make(**long).batch_widths()["readers"]["llama"]["task"].name == "answer", "three answers have more targets"
    assert make(**long, data__questions=2).batch_widths()["readers"]["llama"]["task"].name == "reconstruct"


def test_cached_teacher_has_its_shapes_before_a_row_is_there(make):
    recipe = make(loss__kl=1.0, loss__teacher_k=5)
    before = example_shapes(training(recipe).probe())
    recipe.load_frozen()
    assert before == example_shapes(training(recipe).probe()) == example_shapes(training(recipe).collate([2]))


def test_one_question_is_what_it_was_and_decides_a_run(make):
    plain = make(data__questions=1)
    assert training(plain) is plain.curriculum.stream("train", "answer", 0)
    assert training(plain).digest() != training(make()).digest() != training(make(data__questions=2)).digest()
    cfg = plain.cfg
    saved = config.to_dict(cfg)
    del saved["data"]["questions"]
    assert config.read_saved(saved) == cfg
    assert config.identity(cfg) != config.identity(make().cfg)


def test_questions_in_the_latents_are_encoded_one_by_one(make):
    cfg = make().cfg
    cfg = dataclasses.replace(cfg, prompt=dataclasses.replace(cfg.prompt, question="latents"))
    with pytest.raises(UserError, match=r"config\.data\.questions = 3: "):
        validation.validate(cfg)
