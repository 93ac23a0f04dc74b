"""lw_jax/data/question_cards.py: cards are reproducible, answerable only from the card, and apart in the two splits."""

import collections
import re

import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import question_cards

CHANCE = 0.05  # a guess without the card must stay below this
KINDS = {value: kind for kind, attribute in question_cards.ATTRIBUTES.items() for value in attribute.values}

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


@pytest.mark.parametrize("style", question_cards.STYLES)
def test_same_arguments_give_the_same_cards_and_longer_lists_begin_alike(style):
    first = question_cards.make(23, facts=4, seed=5, split="train", style=style)
    assert first == question_cards.make(41, facts=4, seed=5, split="train", style=style)[:23]
    other = question_cards.make(23, facts=4, seed=6, split="train", style=style)
    assert not {e.context for e in first} & {e.context for e in other}


@pytest.mark.parametrize(("style", "facts"), [("cards", 1), ("cards", 4), ("profiles", 3), ("pairs", 2)])
def test_train_and_validation_share_no_card_whatever_the_seed(style, facts):
    of = (lambda card: frozenset(question_cards.questions(card))) if style == "pairs" else facts_of

    def make(count, seed, split):
        return {of(e) for e in question_cards.make(count, facts=facts, seed=seed, split=split, style=style)}

    train = make(1500, 0, "train")
    assert not train & make(300, 0, "validation") and not train & make(300, 3, "validation")


@pytest.mark.parametrize("facts", [1, 2, 5, 13])
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


@pytest.mark.parametrize(
    ("style", "clues"),
    [
        ("cards", [lambda e: KINDS[e.answers[0]], lambda e: (KINDS[e.answers[0]], name_in(e.question))]),
        ("pairs", [lambda e: e.question]),
    ],
)
def test_answer_cannot_be_guessed_without_the_card(style, clues):
    made = question_cards.make(6000, facts=4, seed=2, split="train", style=style)
    for clue in clues:
        table = collections.defaultdict(collections.Counter)
        for example in made[:3000]:
            table[clue(example)][example.answers[0]] += 1
        best = {key: counts.most_common(1)[0][0] for key, counts in table.items()}
        right = sum(best.get(clue(example)) == example.answers[0] for example in made[3000:])
        assert right / 3000 < CHANCE * (2 if style == "pairs" else 1)  # a key of pairs has 30 values
    places = collections.Counter(e.context.index(e.answers[0]) * 4 // len(e.context) for e in made)
    assert max(places.values()) < 3000, "nor does the answer stand at one place"


@pytest.mark.parametrize("style", question_cards.STYLES)
@pytest.mark.parametrize("facts", [0, 1000])
def test_impossible_numbers_are_refused(facts, style):
    with pytest.raises(UserError, match="config.data"):
        question_cards.make(3, facts=facts, seed=0, split="train", style=style)


@pytest.mark.parametrize("facts", [1, len(question_cards.ATTRIBUTES)])
def test_profile_tells_of_one_person_each_fact_of_another_kind(facts):
    made = question_cards.make(200, facts=facts, seed=1, split="train", style="profiles")
    for example in made:
        found = facts_of(example)
        assert len(found) == len({kind for _, kind, _ in found}) == facts and len({name for name, _, _ in found}) == 1
        assert sum(value == example.answers[0] for _, _, value in found) == 1
        assert next(iter(found))[0] in example.question
    assert len({facts_of(example) for example in made}) > 190


def test_pairs_hold_different_keys_each_with_a_value_of_its_own():
    for example in question_cards.make(200, seed=3, split="train", facts=4, style="pairs"):
        found = question_cards.questions(example)
        keys = [question.removesuffix("?") for question, _ in found]
        assert len(set(keys)) == len(keys) == 4
        assert all(value in question_cards.ATTRIBUTES[key].values for key, (_, value) in zip(keys, found, strict=True))
        assert example.context == ", ".join(f"{key} {value}" for key, (_, value) in zip(keys, found, strict=True))
        assert (example.question, *example.answers) in found


@pytest.mark.parametrize("style", question_cards.STYLES)
def test_every_fact_of_a_card_is_asked_for_once(style):
    found = question_cards.make(20, facts=6, seed=0, split="train", style=style, every=True)
    for card in zip(*[iter(found)] * 6, strict=True):
        assert len({example.context for example in card}) == 1
        assert len({example.question for example in card}) == len({example.id for example in card}) == 6
        assert all(example.answers[0] in card[0].context for example in card)
    assert len({example.context for example in found}) == 20 and len(found) == 120
