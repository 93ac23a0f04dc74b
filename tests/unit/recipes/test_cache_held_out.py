"""The search for the step of a cache message's numbers, without a reader."""

import re

import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.models import cache_codec
from lw_jax.models.cache_codec import Coding, Section
from lw_jax.recipes import cache_held_out, cache_start

LAYERS, HEADS, WIDTH, TEXTS, TOKENS = 3, 2, 12, 6, 50
TABLES = np.stack([np.full((LAYERS, HEADS), 1.0), np.full((LAYERS, HEADS), 0.5)])
Z = np.random.default_rng(0).laplace(0, np.geomspace(8.0, 0.05, WIDTH), (TEXTS * TOKENS, WIDTH)).astype(np.float32)


def write(step, ratio=2):
    """Numbers whose threshold is the step, as a writer's, and sections of them."""
    z = np.where(np.abs(Z) < step / 2, 0, Z)
    kept = np.random.default_rng(1).random((LAYERS, TEXTS * TOKENS, HEADS)) < 1 / ratio
    numbers = np.rint(np.clip(z / step, -(2**30), 2**30)).astype(np.int32)
    parts = [slice(i, i + TOKENS) for i in range(0, len(z), TOKENS)]
    sizes = float(np.float32(step)), (ratio,)
    return numbers, lambda: [Section(numbers[at], *sizes, kept[:, at].astype(np.uint8)) for at in parts]


def find_rate(write, limit, guess):
    return cache_held_out.find_rate(write, TABLES, limit, guess, Z.var(axis=0), of="llama: one of 4 positions")


@pytest.mark.parametrize("guess", [1e-6, 0.3, 50.0])
@pytest.mark.parametrize("ratio", [1, 2])
def test_messages_have_the_bytes_that_are_allowed_with_their_order(ratio, guess):
    limit = 9.0
    found = find_rate(lambda step: write(step, ratio), limit, guess)
    coding = Coding("0" * 16, (found,), {ratio: TABLES[ratio - 1]})
    sent = write(found.step, ratio)[1]()
    size = sum(len(cache_codec.pack([(coding, one)], writer="0" * 16)) for one in sent) / len(Z)
    assert size == pytest.approx(limit, rel=0.02)


def test_what_is_sent_is_made_once_however_often_numbers_are_found():
    found = []

    def count(step):
        numbers, send = write(step)
        return numbers, lambda: found.append(step) or send()

    find_rate(count, 9.0, 50.0)
    assert len(found) == 1


def test_more_bytes_than_numbers_can_say_take_the_least_step():
    found = find_rate(write, 1000.0, 1e-9)
    assert np.abs(Z).max() / found.step == pytest.approx(cache_codec.LARGEST / 1.5, rel=0.1), "room for other texts"


@pytest.mark.parametrize(("limit", "longer"), [(9.0, False), (5.0, True)])
def test_where_no_step_has_the_bytes_the_nearest_trial_is_taken_and_longer_messages_are_warned_of(
    limit, longer, caplog
):
    """Messages of 7 bytes a token at any step, and of 15 in the trial that is last."""
    tried = []

    def jump(step):
        last = len(tried) == cache_held_out.MOST_SOLVES - 1
        tried.append(step)
        numbers, send = write(0.3)
        return numbers * (100 if last else 1), send

    found = find_rate(jump, limit, 0.3)
    assert len(tried) == cache_held_out.MOST_SOLVES and found.step != pytest.approx(tried[-1])
    assert ("not config.message.bytes" in caplog.text) == longer


def test_fewer_bytes_than_the_order_takes_are_refused_by_their_key():
    with pytest.raises(UserError, match=r"^config\.message\.bytes = 0\.5: llama: one of 4"):
        find_rate(write, 0.5, 0.3)


@pytest.mark.parametrize(
    "less, surely",
    [([1.0, 1.1, 0.9, 1.0], True), ([4.0, -1.0, 0.5, 0.5], False), ([-1.0, -1.1, -0.9, -1.0], False), ([5.0], False)],
)
def test_values_are_fitted_only_where_that_helps_beyond_chance(less, surely):
    tokens = np.full(len(less), 3.0)
    exact = cache_held_out.Answers(np.full(len(less), 10.0), np.full(len(less), 6.0), tokens)
    assert (exact.nats, exact.divergence) == (pytest.approx(10 / 3), 2.0)
    assert exact._replace(kl=exact.kl - np.array(less)).is_surely_nearer(exact) == surely


SURELY, PERHAPS = np.array([1.0, 1.1, 0.9, 1.0]), np.array([4.0, -1.0, 0.5, 0.5])


class Settled:
    """Stands in for held-out texts; `served`: by ratio, by how much less each answer of fitted messages diverges."""

    name, tokens, code, has_others = "llama", 7, {"variance": np.ones(WIDTH)}, True

    def __init__(self, served):
        self.served, self.tried = served, []

    def __len__(self):
        return 4

    def find_rate(self, ratio, limit, step, *, fitted):
        self.tried.append((ratio, fitted))
        numbers = np.full(WIDTH, ratio)
        return cache_codec.Statistics(ratio + 0.5 * fitted, numbers, numbers), (ratio, fitted)

    def answers(self, sent, *, shuffled=False):
        ratio, fitted = sent
        less = self.served.get(ratio, np.zeros(4)) if fitted else np.zeros(4)
        return cache_held_out.Answers(np.full(4, 5.0), 5.0 - less, np.full(4, 2.0))

    def answers_of_prompt(self, field):
        return cache_held_out.Answers(np.full(4, 9.0), np.full(4, 7.0), np.full(4, 2.0))


@pytest.mark.parametrize(
    ("served", "own", "tried", "fitted"),
    [
        ({}, 4, {8}, []),
        ({8: SURELY}, 4, {8, 4}, range(8, 17)),
        ({8: SURELY, 2: SURELY}, 4, {8, 4}, range(8, 17)),
        ({8: SURELY, 4: SURELY}, 4, {8, 4, 2}, range(4, 17)),
        ({8: PERHAPS, 4: PERHAPS}, 4, {8, 4, 2}, range(4, 17)),
        ({8: PERHAPS, 4: PERHAPS, 2: PERHAPS}, 4, {8, 4, 2}, range(4, 17)),
        ({16: PERHAPS}, 16, {16, 8}, [16]),
        ({8: SURELY, 4: SURELY, 2: SURELY}, 1, {8, 4, 2}, range(2, 17)),
    ],
)
def test_each_ratio_is_fitted_where_that_serves_it_and_all_larger_ones(served, own, tried, fitted, capsys):
    texts = Settled(served)
    texts.has_others = own != 16  # else each would be read from its own message
    found = cache_start._settle(texts, 256, own)
    said = capsys.readouterr().out
    assert ("another text's" in said) == texts.has_others
    assert {ratio for ratio, way in texts.tried if way} == tried
    assert [ratio for ratio in range(1, 17) if found["fitted"][ratio - 1]] == list(fitted)
    steps = {ratio: ratio + 0.5 * (ratio in fitted) for ratio in {own, 1, 2, 4, 8}}
    for ratio, step in steps.items():
        assert re.search(rf"one of {ratio} positions: .*ones are taken, step {step:.3g}\n", said)
    for ratio in range(1, 17):
        assert found["step"][ratio - 1] == steps[max(one for one in steps if one <= ratio)]
        assert found["zero"].shape == (16, WIDTH)
