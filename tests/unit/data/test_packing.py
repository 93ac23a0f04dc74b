"""Questions of a text packed into one row of a reader: what a batch holds, its loss, its curve, its plan."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core import validation
from lw_jax.core.errors import UserError
from lw_jax.core.types import LossTerms
from lw_jax.data import question_cards
from lw_jax.data.batches import fill
from lw_jax.data.data_schedule import DataSchedule, Phase
from lw_jax.data.packing import Packed
from lw_jax.models import decoder, rotary
from tests import tiny

GRADIENT = 2e-4  # of the largest in a leaf, likewise; a gain's, one number, is a sum that cancels

COUNTS = (3, 1, 2, 7, 3, 4, 1, 5, 2, 3, 6, 1)  # questions of each text
TOKENS = 136  # of a row: three questions of these tokenizers with their answers, or two

pytestmark = pytest.mark.usefixtures("module_cache")


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
def make(root, source, module_cache):
    def recipe(**changes):
        return tiny.make_recipe(root, **{"data__train": source, "data__packed_tokens": TOKENS} | changes)

    return recipe


def training(recipe):
    (phase,) = recipe.data_schedule().phases
    ((stream, _),) = phase.streams
    return stream


@pytest.fixture(scope="module")
def packed(make):
    return training(make())


def lengths(fields, row):
    return fields["after"]["mask"][row].sum() + (fields["weights"][row] > 0).sum() - 1


def test_each_question_is_in_one_row_with_others_of_its_text_as_many_as_fit(packed):
    assert isinstance(packed, Packed) and sorted(sum(packed.groups, ())) == list(range(sum(COUNTS)))
    asked = packed.encoded.examples
    assert all(len({asked[position].context for position in group}) == 1 for group in packed.groups)
    assert {len(group) for group in packed.groups} == {1, 2, 3}
    each = packed.encoded.collate(range(sum(COUNTS)))["readers"].values()
    for group, behind in itertools.pairwise(packed.groups):
        assert all(sum(lengths(fields, position) for position in group) <= TOKENS for fields in each)
        if asked[group[0]].context == asked[behind[0]].context:
            tried = max(sum(lengths(fields, position) for position in (*group, behind[0])) for fields in each)
            assert tried > TOKENS, group


def test_a_row_holds_its_questions_one_behind_the_other_and_where_their_answers_are_predicted(packed):
    chosen = [4, 0, 1]
    batch = packed.collate(chosen)
    assert batch["index"].tolist() == chosen and batch["source"]["ids"].shape[0] == 3
    for row, number in enumerate(chosen):
        group = packed.groups[number]
        each = packed.encoded.collate(group)
        np.testing.assert_array_equal(batch["source"]["ids"][row], each["source"]["ids"][0])
        for name, fields in batch["readers"].items():
            own, alone = jax.tree.map(lambda leaf, row=row: leaf[row], fields), each["readers"][name]
            end = 0
            for place in range(len(group)):
                real = alone["weights"][place] > 0
                question = alone["after"]["ids"][place][alone["after"]["mask"][place]]
                ids = [*question, *alone["targets"][place][real][:-1]]
                at = own["packed"]["segments"] == place + 1
                np.testing.assert_array_equal(own["packed"]["ids"][at], ids)
                targets = slice(end, end + real.sum())
                np.testing.assert_array_equal(own["targets"][targets], alone["targets"][place][real])
                # The state of the question's last token predicts the first token of the answer.
                first = np.flatnonzero(at)[0] + len(question) - 1
                np.testing.assert_array_equal(own["places"][targets], first + np.arange(real.sum()))
                end += real.sum()
            assert (own["weights"][:end] == 1).all() and not own["weights"][end:].any()
    filled = fill(batch, 5)["readers"]["llama"]["weights"]
    assert len(filled) == 5 and not filled[3:].any() and filled[0].any()


def test_what_is_drawn_is_drawn_once_a_text(packed):
    schedule = DataSchedule((Phase(1, ((packed, 1.0),), slots=(2, 5)),))
    whole = schedule.batch(3, global_batch=16, seed=0, share=slice(0, 16))
    for fields in whole["readers"].values():
        assert fields["channel"].shape == (16, 3) and len(set(fields["channel"][:, 0])) == 2
        np.testing.assert_array_equal(fields["channel"], whole["source"]["channel"])
    halves = [schedule.batch(3, global_batch=16, seed=0, share=share) for share in (slice(0, 5), slice(5, 16))]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda *parts: np.concatenate(parts), *halves), whole)


KINDS = {
    "embeddings": {"only": "qwen", "loss__kl": 1.0, "loss__teacher_k": 7},
    "kv": {"only": "qwen", "adapter__kind": "kv", "loss__kl": 1.0, "loss__teacher_k": 0, "compute__logits_chunk": 32},
}


@pytest.mark.parametrize("kind", ["embeddings", pytest.param("kv", marks=pytest.mark.slow)])
def test_loss_and_gradient_are_the_sum_over_single_questions(make, kind):
    recipe = make(**KINDS[kind])
    packed, built = training(recipe), recipe.build()
    chosen = [next(i for i, group in enumerate(packed.groups) if len(group) == size) for size in (3, 2, 1)]
    plain = make(**KINDS[kind], data__packed_tokens=0)
    questions = training(plain)
    if recipe.cfg.loss.teacher_k:
        plain.load_frozen()

    run = tiny.gradient_of(recipe, built.frozen)
    found = run(built.trainable, jax.tree.map(jnp.asarray, packed.collate(chosen)))
    assert questions.examples == packed.encoded.examples
    single = [position for number in chosen for position in packed.groups[number]]
    assert len(single) == 6
    gradient, terms = run(built.trainable, jax.tree.map(jnp.asarray, questions.collate(single)))
    assert isinstance(terms, LossTerms) and set(found[1].terms) >= {"nll/qwen", "kl/qwen"}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=tiny.LOSS), found[1], terms)
    for one, other in zip(*map(jax.tree.leaves, (found[0], gradient)), strict=True):
        np.testing.assert_allclose(one, other, atol=GRADIENT * np.abs(other).max())


@pytest.fixture(scope="module")
def alone(make, tmp_path_factory):
    """(exit code, losses, weights) of one device."""
    return tiny.unsaved_curve(make(**CURVE), tmp_path_factory.mktemp("alone") / "run")


CURVE = {"adapter__kind": "kv", "loss__kl": 0.5, "stages__pretrain__share": 0.4, "stages__pretrain__lengths": (16,)}
PLACED = {
    "split": {"devices": 2, "strategy": "split", "train__micro_batch": 2},
    "replicate 3, accumulate 2": {"devices": 3, "train__micro_batch": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACED)
def test_loss_curve_is_that_of_one_device(make, alone, name, tmp_path):
    tiny.assert_same_curve(tiny.unsaved_curve(make(**CURVE, **PLACED[name]), tmp_path / "run"), alone)


@pytest.mark.parametrize("changes", [{}, {"loss__kl": 1.0}, {"loss__kl": 1.0, "loss__teacher_k": 0}])
def test_planned_batch_has_the_fields_of_a_real_one_and_validation_one_question(make, changes):
    recipe = make(**changes)
    planned, real = recipe.batch_widths(), training(recipe).probe()
    kinds = [jax.tree.map(lambda leaf, lead=lead: (leaf.dtype, leaf.ndim - lead), one)
             for lead, one in ((0, planned), (1, real))]  # fmt: skip
    assert kinds[0] == kinds[1]
    fields = planned["readers"]["llama"]
    assert fields["packed"]["ids"].shape == (TOKENS,) and fields["targets"].shape == (TOKENS // 2,)
    plain = make(data__packed_tokens=0, **changes)
    assert recipe.validation_widths() == plain.batch_widths() == plain.validation_widths()


def test_a_row_has_room_for_the_longest_question_with_its_answer(make):
    with pytest.raises(UserError, match=r"config\.data\.packed_tokens = 70"):
        validation.validate(make(data__packed_tokens=70).cfg)


def test_packed_questions_of_a_longrope_reader_past_its_short_frequencies_are_refused():
    cfg = dataclasses.replace(tiny.DECODER, rope_scaling=dataclasses.replace(LONG, original_max_positions=12))
    x, numbers = jnp.zeros((1, 13, cfg.width)), jnp.ones((1, 13), jnp.int32)
    with pytest.raises(UserError, match=r"data\.packed_tokens: 13 positions.* 12"):
        decoder.forward(tiny.draw_decoder(cfg), cfg, x, mask=numbers > 0, segments=numbers)


WINDOWED = dataclasses.replace(tiny.DECODER, window=5)
LONG = rotary.LongRope(short=(1.0,) * 5, long=(2.0,) * 5, gain=1.1, original_max_positions=20)


@pytest.mark.parametrize(
    ("cfg", "before"),
    [
        (tiny.DECODER, "a shared prefix"),
        (WINDOWED, "keys and values"),
        (dataclasses.replace(tiny.DECODER, rope_scaling=LONG), "nothing"),
    ],
    ids=["shared", "window kv", "longrope"],
)
def test_a_packed_text_has_the_states_that_it_has_alone(cfg, before):
    params, rng = tiny.draw_decoder(cfg), np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    common, texts = draw(4, cfg.width), [draw(length, cfg.width) for length in (6, 1, 5)]
    given = {}
    if before == "keys and values":
        keys, values = (draw(cfg.layers, 1, 3, cfg.kv_heads, cfg.head_dim) for _ in range(2))
        given["kv_prefix"] = decoder.KVPrefix(*map(jnp.asarray, (keys, values, [[True, False, True]])))
    if before == "a shared prefix":
        given["shared_prefix"] = decoder.SharedPrefix(jnp.asarray(draw(1, 3, cfg.width)), jnp.ones((1, 3), bool))

    @jax.jit
    def forward(x, mask, segments=None):
        return decoder.forward(params, cfg, x[None], mask=mask[None], segments=segments, **given).hidden[0, 4:]

    def read(text, length, segments=None):
        """Returns the states of a text, padded to one length for all, behind the common positions."""
        x = np.concatenate([common, text, np.zeros((length - len(text), cfg.width), np.float32)])
        mask = np.arange(len(x)) < 4 + len(text)
        mask[2] = False  # padding among the common positions
        return forward(x, mask, segments)[: len(text)]

    def read_packed(numbers):
        return read(np.concatenate(texts), 12, np.array([[0] * 4 + numbers], np.int32))

    alone = np.concatenate([read(text, 6) for text in texts])
    np.testing.assert_allclose(read_packed([1] * 6 + [2] + [3] * 5), alone, atol=2e-5)
    assert np.abs(read_packed([1] * 12) - alone).max() > 1e-2, "as one text they see each other"
