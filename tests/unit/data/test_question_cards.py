"""lw_jax/data/question_cards.py: cards are reproducible, answerable only from the card, and apart in the two splits."""

import collections
import re

import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import question_cards

CHANCE = 0.05  # a guess without the card must stay below this


SENTENCES = {
    template.format(name="@", value=value): (kind, value)
    for kind, attribute in question_cards.ATTRIBUTES.items()
    for value in attribute.values
    for template in attribute.sentences
}


def facts_of(example):
    """The card's (name, attribute, value) facts, read back from its text by the sentence templates."""
    found = set()
    for sentence in re.findall(r"[^.]+\.", example.context):
        words = sentence.removesuffix(".").split()
        name = next(f"{a} {b}" for a, b in zip(words, words[1:], strict=False) if a in question_cards.FIRST_NAMES)
        found.add((name, *SENTENCES[sentence.strip().replace(name, "@")]))
    return frozenset(found)


def test_same_arguments_give_the_same_cards_and_longer_lists_begin_alike():
    first = question_cards.make(23, facts=4, seed=5, split="train")
    assert first == question_cards.make(23, facts=4, seed=5, split="train")
    assert first == question_cards.make(41, facts=4, seed=5, split="train")[:23]


def test_other_seed_gives_other_cards():
    a, b = (question_cards.make(50, facts=4, seed=seed, split="train") for seed in (0, 1))
    assert not {e.context for e in a} & {e.context for e in b}


@pytest.mark.parametrize("facts", [1, 2, 4])
def test_train_and_validation_share_no_card_whatever_the_seed(facts):
    train = {facts_of(e) for e in question_cards.make(1500, facts=facts, seed=0, split="train")}
    for seed in (0, 3):
        assert not train & {facts_of(e) for e in question_cards.make(300, facts=facts, seed=seed, split="validation")}


@pytest.mark.parametrize("facts", [1, 2, 3, 4, 5, 7, 10, 13])
def test_card_holds_the_asked_fact_once_and_distractors_of_its_kind(facts):
    for example in question_cards.make(29, facts=facts, seed=1, split="train"):
        found = facts_of(example)
        assert len(found) == facts
        (answer,) = example.answers
        asked = [(name, kind) for name, kind, value in found if value == answer]
        assert len(asked) == 1
        name, kind = asked[0]
        assert name in example.question
        assert sum(n == name and k == kind for n, k, _ in found) == 1
        assert facts == 1 or sum(k == kind for _, k, _ in found) >= 2
        assert answer.lower() not in example.question.lower().split()


def name_in(text):
    """The first name that stands in a question or sentence."""
    return next(word for word in text.replace(".", " ").split() if word in question_cards.FIRST_NAMES)


def test_answer_cannot_be_guessed_without_the_card():
    assert all(1 / len(set(a.values)) < CHANCE for a in question_cards.ATTRIBUTES.values())
    made = question_cards.make(6000, facts=4, seed=2, split="train")
    kinds = {value: kind for kind, a in question_cards.ATTRIBUTES.items() for value in a.values}
    for clue in (lambda e: kinds[e.answers[0]], lambda e: (kinds[e.answers[0]], name_in(e.question))):
        table = collections.defaultdict(collections.Counter)
        for example in made[:3000]:
            table[clue(example)][example.answers[0]] += 1
        best = {key: counts.most_common(1)[0][0] for key, counts in table.items()}
        assert sum(best.get(clue(e)) == e.answers[0] for e in made[3000:]) / 3000 < CHANCE


def test_position_of_the_answer_is_varied():
    places = collections.Counter()
    for example in question_cards.make(400, facts=4, seed=0, split="train"):
        name, (value,) = name_in(example.question), example.answers
        sentences = example.context.removesuffix(".").split(". ")
        places[next(i for i, s in enumerate(sentences) if name in s and value in s)] += 1
    assert set(places) == {0, 1, 2, 3}
    assert max(places.values()) < 200


def test_order_of_the_facts_is_varied():
    made = question_cards.make(100, facts=4, seed=0, split="train")
    neighbours = [[name_in(s) for s in e.context.removesuffix(".").split(". ")][:2] for e in made]
    assert 0 < sum(a == b for a, b in neighbours) < 100  # the first two facts are of one person, or of two


def test_values_are_one_or_two_short_words_and_belong_to_one_attribute():
    values = [value for a in question_cards.ATTRIBUTES.values() for value in a.values]
    assert len(set(values)) == len(values)
    assert all(len(value.split()) <= 2 and len(value) <= 14 for value in values)


def test_cards_of_four_facts_are_short():
    words = [len(e.context.split()) for e in question_cards.make(500, facts=4, seed=0, split="train")]
    assert 16 <= min(words) <= max(words) <= 40


@pytest.mark.parametrize(("count", "facts"), [(0, 4), (3, 0), (3, question_cards.MAX_FACTS["cards"] + 1)])
def test_impossible_numbers_are_refused(count, facts):
    with pytest.raises(UserError, match="config.data"):
        question_cards.make(count, facts=facts, seed=0, split="train")


@pytest.mark.parametrize("facts", [1, 3, len(question_cards.ATTRIBUTES)])
def test_profile_tells_of_one_person_each_fact_of_another_kind(facts):
    made = question_cards.make(200, facts=facts, seed=1, split="train", style="profiles")
    for example in made:
        found = facts_of(example)
        assert len(found) == len({kind for _, kind, _ in found}) == facts and len({name for name, _, _ in found}) == 1
        assert sum(value == example.answers[0] for _, _, value in found) == 1
        assert next(iter(found))[0] in example.question
    assert len({facts_of(example) for example in made}) > 190
    other = question_cards.make(300, facts=facts, seed=3, split="validation", style="profiles")
    assert not {facts_of(e) for e in made} & {facts_of(e) for e in other}


PAIRS = {"facts": 4, "style": "pairs"}


def test_pairs_hold_different_keys_each_with_a_value_of_its_own():
    for example in question_cards.make(200, seed=3, split="train", **PAIRS):
        found = question_cards.questions(example)
        keys = [question.removesuffix("?") for question, _ in found]
        assert len(set(keys)) == len(keys) == 4
        assert all(value in question_cards.ATTRIBUTES[key].values for key, (_, value) in zip(keys, found, strict=True))
        assert example.context == ", ".join(f"{key} {value}" for key, (_, value) in zip(keys, found, strict=True))
        assert (example.question, *example.answers) in found


def test_every_place_and_every_key_of_pairs_is_asked_for():
    made = question_cards.make(400, seed=0, split="train", **PAIRS)
    places = collections.Counter([q for q, _ in question_cards.questions(e)].index(e.question) for e in made)
    assert set(places) == {0, 1, 2, 3} and max(places.values()) < 200
    assert {e.question for e in made} == {f"{key}?" for key in question_cards.ATTRIBUTES}


def test_value_of_a_pair_cannot_be_guessed_from_its_key():
    made = question_cards.make(3000, seed=2, split="train", **PAIRS)
    table = collections.defaultdict(collections.Counter)
    for example in made[:1500]:
        table[example.question][example.answers[0]] += 1
    best = {key: counts.most_common(1)[0][0] for key, counts in table.items()}
    assert sum(best[e.question] == e.answers[0] for e in made[1500:]) / 1500 < 2 * CHANCE  # 30 values and chance


@pytest.mark.parametrize("seed", [0, 3])
def test_splits_of_pairs_share_no_card_in_whatever_order(seed):
    train = {
        frozenset(question_cards.questions(e))
        for e in question_cards.make(1500, seed=0, split="train", facts=2, style="pairs")
    }
    other = question_cards.make(300, seed=seed, split="validation", facts=2, style="pairs")
    assert not train & {frozenset(question_cards.questions(e)) for e in other}


def test_pairs_are_no_cards_and_the_same_for_the_same_words():
    pairs = question_cards.make(23, seed=5, split="train", **PAIRS)
    assert pairs == question_cards.make(41, seed=5, split="train", **PAIRS)[:23]
    assert not {e.id for e in pairs} & {e.id for e in question_cards.make(23, facts=4, seed=5, split="train")}


@pytest.mark.parametrize("style", ["profiles", "pairs"])
@pytest.mark.parametrize(("count", "facts"), [(0, 4), (3, 0), (3, len(question_cards.ATTRIBUTES) + 1)])
def test_impossible_numbers_of_profiles_and_pairs_are_refused(count, facts, style):
    with pytest.raises(UserError, match="config.data"):
        question_cards.make(count, facts=facts, seed=0, split="train", style=style)


@pytest.mark.parametrize("style", question_cards.STYLES)
def test_every_fact_of_a_card_is_asked_for_once(style):
    found = question_cards.make(20, facts=6, seed=0, split="train", style=style, every=True)
    for card in zip(*[iter(found)] * 6, strict=True):
        assert len({example.context for example in card}) == 1
        assert len({example.question for example in card}) == len({example.id for example in card}) == 6
        assert all(example.answers[0] in card[0].context for example in card)
    assert len({example.context for example in found}) == 20 and len(found) == 120
