"""Generated question cards: facts about invented people, or keys and values, with a question for one of them.

"cards" tell of several people, "profiles" of one; "pairs" are keys with values. A value is drawn independently of the
name, so that without the card the best guess is one of an attribute's values. On "cards" at least one other person has
a value of the same kind (from two facts on): the card's other facts do not give the answer away either.
"""

import dataclasses
import math
import random
import zlib
from typing import Literal

from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.core.validation import MADE


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One kind of fact: its sentences, its questions and its possible values."""

    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in text.split())


FIRST_NAMES = _words(
    "Mara Tom Nina Paul Lena Hugo Ivy Carl Rosa Finn Emma Otto Vera Luke Anna Max Clara Neil Ruth Jack "
    "Dora Sam Alma Leo Kate Ben Lucy Adam Jane Mark Ella Noah"
)
LAST_NAMES = _words(
    "Ellis Reed Hart Stone Wood Lane Park Bell Ford Hill West North Cross Field Brook Marsh Glen Shaw Dale Nash "
    "Grant Cole Webb Page Moss Day Frost Lake Kerr Boyd Platt Quinn"
)

ATTRIBUTES = {
    "city": Attribute(
        ("{name} lives in {value}.", "{name} has a home in {value}.", "The home of {name} is in {value}."),
        ("Where does {name} live?", "In which city does {name} live?"),
        _words(
            "Lisbon Paris Rome Berlin London Madrid Vienna Dublin Oslo Athens Prague Warsaw Cairo Tokyo Delhi Moscow "
            "Boston Chicago Denver Dallas Miami Seattle Sydney Geneva Venice Milan Toronto Havana Lima New_York"
        ),
    ),
    "job": Attribute(
        ("{name} works as a {value}.", "{name} is a {value}.", "By trade {name} is a {value}."),
        ("What is the job of {name}?", "What does {name} work as?"),
        _words(
            "baker teacher nurse farmer pilot doctor driver cook painter singer writer lawyer judge banker barber "
            "butcher carpenter dancer dentist gardener hunter miner plumber sailor soldier tailor waiter welder "
            "fisherman postman"
        ),
    ),
    "pet": Attribute(
        ("{name} has a pet {value}.", "{name} keeps a {value}.", "The pet of {name} is a {value}."),
        ("What pet does {name} have?", "Which animal does {name} keep?"),
        _words(
            "cat dog rabbit parrot goat pony hamster turtle snake lizard duck goose hen pig sheep donkey ferret frog "
            "mouse goldfish pigeon falcon canary spider crab llama beetle cow horse monkey"
        ),
    ),
    "colour": Attribute(
        ("{name} has a {value} door.", "{name} painted the door {value}.", "The door of {name} is {value}."),
        ("What colour is the door of {name}?",),
        _words(
            "red blue green yellow purple pink brown black white grey gold silver beige navy teal khaki copper maroon "
            "violet cream coral ruby bronze rust scarlet crimson tan dark_blue light_green turquoise"
        ),
    ),
    "instrument": Attribute(
        ("{name} plays the {value}.", "{name} owns and plays a {value}.", "{name} practises the {value} daily."),
        ("Which instrument does {name} play?", "What does {name} play?"),
        _words(
            "piano violin guitar drum flute harp cello trumpet banjo clarinet tuba viola lute fiddle horn trombone "
            "mandolin saxophone harmonica xylophone recorder zither bassoon bugle cornet keyboard triangle tambourine "
            "bagpipe double_bass"
        ),
    ),
    "fruit": Attribute(
        ("{name} likes {value} best.", "{name} eats {value} every day.", "{name} buys {value} at the market."),
        ("Which fruit does {name} like?", "What fruit does {name} eat?"),
        _words(
            "apples pears plums cherries bananas grapes lemons limes oranges melons figs dates mangoes peaches kiwis "
            "berries apricots currants papayas olives pineapples raspberries strawberries blueberries quinces guavas "
            "nectarines tangerines coconuts pomegranates"
        ),
    ),
    "language": Attribute(
        ("{name} speaks {value}.", "{name} is learning {value}.", "{name} reads books in {value}."),
        ("Which language does {name} speak?", "What language does {name} know?"),
        _words(
            "French German Spanish Italian Greek Polish Czech Dutch Danish Swedish Finnish Russian Turkish Arabic "
            "Hebrew Hindi Chinese Japanese Korean Thai Latin Irish Welsh Basque Persian Swahili Malay Bengali Tamil "
            "Hungarian"
        ),
    ),
    "sport": Attribute(
        ("{name} plays {value}.", "{name} is good at {value}.", "{name} trains for {value}."),
        ("Which sport does {name} play?", "What sport is {name} good at?"),
        _words(
            "tennis football hockey golf rugby cricket boxing judo chess darts rowing sailing skiing skating surfing "
            "running cycling fencing archery bowling climbing diving karate curling polo squash wrestling volleyball "
            "basketball baseball"
        ),
    ),
}
STYLES = MADE
MAX_FACTS = {"cards": len(ATTRIBUTES) ** 2, "profiles": len(ATTRIBUTES), "pairs": len(ATTRIBUTES)}
VALIDATION_SHARE = 8  # one card in so many belongs to the validation split


def make(  # noqa: PLR0913
    count: int,
    *,
    facts: int,
    seed: int,
    split: Literal["train", "validation"],
    style: str = "cards",
    every: bool = False,
) -> list[Example]:
    """Returns `count` cards of `facts` sentences, or of as many keys with values ("pairs"); the same for equal words.

    Each is asked for one of its facts; with `every`, for each of them, in as many examples. No card is in both splits,
    whatever the seeds and counts. Raises UserError for a number of facts that cannot be made.
    """
    if not 1 <= facts <= MAX_FACTS[style]:
        raise UserError(f"config.data.facts={facts} must be between 1 and {MAX_FACTS[style]} for {style!r}")
    rng = random.Random(f"{split}/{seed}/{facts}")
    draw = {"cards": _draw, "profiles": _draw_profile, "pairs": _draw_pairs}[style]
    examples: list[Example] = []
    number = 0
    while number < count:
        card = draw(rng, facts)
        if _split_of(card) == split:
            examples += _write(rng, card, f"{style}/{split}/{seed}/{number}", every=every)
            number += 1
    return examples


def _draw(rng: random.Random, facts: int) -> list[tuple[str, str, str]]:
    """Returns (name, attribute, value) facts: a grid of people x attributes in random order, short of its last cells.

    As many people as attributes or more, so that from two facts on each attribute belongs to two people at least.
    """
    attributes = rng.sample(sorted(ATTRIBUTES), math.isqrt(facts))
    people = -(-facts // len(attributes))
    names = [
        f"{first} {last}"
        for first, last in zip(rng.sample(FIRST_NAMES, people), rng.sample(LAST_NAMES, people), strict=True)
    ]
    columns = [rng.sample(ATTRIBUTES[attribute].values, people) for attribute in attributes]
    grid = [
        (name, attribute, column[row])
        for row, name in enumerate(names)
        for attribute, column in zip(attributes, columns, strict=True)
    ][:facts]
    rng.shuffle(grid)
    return grid


def _draw_profile(rng: random.Random, facts: int) -> list[tuple[str, str, str]]:
    name = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    return [(name, kind, value) for _, kind, value in _draw_pairs(rng, facts)]


def _draw_pairs(rng: random.Random, facts: int) -> list[tuple[str, str, str]]:
    return [("", key, rng.choice(ATTRIBUTES[key].values)) for key in rng.sample(sorted(ATTRIBUTES), facts)]


def _split_of(card: list[tuple[str, str, str]]) -> str:
    """Returns the split a card belongs to, decided by its facts alone, not by their order or wording."""
    key = "|".join("/".join(fact) for fact in sorted(card))
    return "validation" if zlib.crc32(key.encode()) % VALIDATION_SHARE == 0 else "train"


def questions(example: Example) -> list[tuple[str, str]]:
    """Returns all questions that a card of "pairs" answers, with their answers, in the card's order."""
    return [(f"{key}?", value) for key, value in (pair.split(" ", 1) for pair in example.context.split(", "))]


def _write(rng: random.Random, card: list[tuple[str, str, str]], id: str, *, every: bool) -> list[Example]:
    """Returns the examples of a card; facts without a name are keys and values."""
    if card[0][0]:
        sentences = (
            rng.choice(ATTRIBUTES[kind].sentences).format(name=name, value=value) for name, kind, value in card
        )
        context = " ".join(sentences)
    else:
        context = ", ".join(f"{key} {value}" for _, key, value in card)
    facts, examples = card if every else [rng.choice(card)], []
    for number, (name, kind, value) in enumerate(facts):
        question = rng.choice(ATTRIBUTES[kind].questions).format(name=name) if name else f"{kind}?"
        examples.append(Example(id if len(facts) == 1 else f"{id}/{number}", context, question, (value,)))
    return examples
