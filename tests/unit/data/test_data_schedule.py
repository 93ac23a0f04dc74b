"""lw_jax/data/data_schedule.py, loader.py: any batch by its number, in exact shares and drawn shapes, and restored."""

import collections
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.core.types import EXACT, Example
from lw_jax.data.batches import Encoded, Field, fill, weigh
from lw_jax.data.data_schedule import DataSchedule, Phase
from lw_jax.data.loader import Loader, eval_batches

BATCH = 6
SLOTS, WIDTH = 8, 11


def encoded(count, task):
    def field(scale, left):
        return Field([np.arange(1 + i % 5, dtype=np.int32) + scale * i for i in range(count)], 8, -1, left)

    examples = tuple(Example(f"{task} {i}", "c", "q", ("a",)) for i in range(count))
    readers = {"a": {"before": field(2, True), "after": field(3, True), "answer": field(5, False)}}
    return Encoded(examples, field(7, False), readers, {}, slots=SLOTS, width=WIDTH, task=task)


ASKED, REPEATED, CONTINUED = encoded(23, "answer"), encoded(17, "reconstruct"), encoded(7, "continuation")
MIXED = Phase(29, ((ASKED, 0.5), (REPEATED, 0.3), (CONTINUED, 0.2)))
COURSE = DataSchedule(
    (
        Phase(5, ((REPEATED, 1.0),)),
        dataclasses.replace(MIXED, slots=(2, 8), widths=(3, 7, 11), bits=(16, 4)),
        Phase(13, ((ASKED, 3.0), (CONTINUED, 1.0)), bits=(8,)),
    )
)
ENDS = (5, 34)


def batch(number, *, data_schedule=COURSE, seed=3, share=slice(None)):
    return data_schedule.batch(number, global_batch=BATCH, seed=seed, share=share)


def task_of(one):
    return one["readers"]["a"]["task"].name


def loader(seed=3, share=(0, 1)):
    return Loader(COURSE, global_batch=BATCH, seed=seed, share=share)


def test_iterating_gives_the_batch_of_each_number_and_seed():
    found = list(itertools.islice(loader(), 49))
    for number in (48, 0, 4, 5, 33, 34, 47, 7):  # in no order, about every border
        np.testing.assert_equal(batch(number), found[number])
    assert [task_of(one) for one in found[:5]] == ["reconstruct"] * 5
    assert batch(0, seed=4)["index"].tolist() != found[0]["index"].tolist()


@pytest.mark.parametrize("weights", [(0.97, 0.02, 0.01), (5.0, 0.25, 2.0)])
def test_every_beginning_of_a_stretch_has_its_shares_within_one_batch(weights):
    streams = (ASKED, REPEATED, CONTINUED)
    data_schedule = DataSchedule((Phase(101, tuple(zip(streams, weights, strict=True))),))
    used, shares = collections.Counter(), np.array(weights) / sum(weights)
    for number in range(101):
        used[task_of(data_schedule.batch(number, global_batch=1, seed=3, share=slice(None)))] += 1
        counts = np.array([used[one.task] for one in streams])
        assert np.abs(counts - shares * (number + 1)).max() < 1, number


def test_each_stream_gives_each_example_once_an_epoch_across_all_stretches():
    seen = collections.defaultdict(list)
    for number in range(60):
        one = batch(number)
        seen[task_of(one)].extend(one["index"].tolist())
    for stream in (ASKED, REPEATED, CONTINUED):
        size, order = len(stream), seen[stream.task]
        epochs = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        assert len(epochs) >= 3 and all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "each in another order"


def test_shapes_are_drawn_of_the_choices_alone_and_each_is_met_about_as_often():
    drawn = np.concatenate([batch(number)["source"]["channel"] for number in range(*ENDS)])
    for column, choices in enumerate([(2, 8), (3, 7, 11), (16, 4)]):
        counts = collections.Counter(drawn[:, column].tolist())
        assert set(counts) == set(choices)
        assert min(counts.values()) > 0.6 * len(drawn) / len(choices)
    assert len({tuple(row) for row in drawn.tolist()}) == 12, "drawn each for itself"
    plain = batch(0)["source"]["channel"]
    assert plain.tolist() == [[SLOTS, WIDTH, EXACT]] * BATCH
    assert batch(ENDS[1])["source"]["channel"].tolist() == [[SLOTS, WIDTH, 8]] * BATCH


@pytest.mark.parametrize("at", [17, 34])
def test_restored_in_the_middle_of_a_stage_the_batches_are_the_same(at):
    first = loader()
    for _ in range(at):
        next(first)
    state = json.loads(json.dumps(first.state()))
    again, half = loader(), loader(share=(1, 2))
    next(again)  # back, on an iterator that has run ahead
    again.restore(state)
    half.restore(state)
    assert again.state() == state
    for _ in range(11):
        expected = next(first)
        np.testing.assert_equal(next(again), expected)
        np.testing.assert_array_equal(next(half)["source"]["channel"], expected["source"]["channel"][BATCH // 2 :])


def test_stream_smaller_than_a_batch_is_refused_with_its_task_and_numbers():
    with pytest.raises(UserError, match=r"7 usable examples \(continuation\).*global_batch=8"):
        Loader(COURSE, global_batch=8, seed=3)
    Loader(COURSE, global_batch=7, seed=3)


# --- the loader


@pytest.mark.parametrize("count", [2, 4])
def test_shares_of_all_processes_are_the_batch_of_one(count):
    whole, parts = loader(), [loader(share=(p, count)) for p in range(count)]
    for _ in range(7):
        expected = next(whole)
        shares = [next(part) for part in parts]
        assert {len(share["index"]) for share in shares} <= {BATCH // count, -(-BATCH // count)}
        jax.tree.map(lambda leaf, *parts: np.testing.assert_array_equal(np.concatenate(parts), leaf), expected, *shares)


@pytest.mark.parametrize("change", [{"count": 24}, {"global_batch": 3}, {"seed": 9}])
def test_state_of_another_order_is_refused_by_name(change):
    options = {"global_batch": BATCH, "seed": 3} | change
    state = Loader(DataSchedule.of(ASKED), global_batch=BATCH, seed=3).state()
    other = Loader(DataSchedule.of(encoded(options.pop("count", 23), "answer")), **options)
    with pytest.raises(UserError, match="examples=.23.|global_batch=6|seed=3"):
        other.restore(state)


def test_batch_smaller_than_the_number_of_processes_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"global_batch=6\b.*\b7"):
        loader(share=(0, 7))


def test_filled_batch_repeats_its_last_example_without_weight():
    batch = ASKED.collate([3, 20, 7])
    filled = fill(batch, 5)
    assert filled["index"].tolist() == [3, 20, 7, 7, 7]
    repeated = weigh(ASKED.collate([3, 20, 7, 7, 7]), np.arange(5) < 3)
    jax.tree.map(np.testing.assert_array_equal, filled, repeated)
    assert filled["readers"]["a"]["weights"].any(axis=1).tolist() == [True, True, True, False, False]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf: leaf[:3], filled), batch)
    assert fill(batch, 3) is batch


def test_evaluation_keeps_the_order_and_marks_the_filling():
    out = list(eval_batches(ASKED, 5))
    assert out[-1]["index"].tolist() == [20, 21, 22, 22, 22]
    assert out[-1]["valid"].tolist() == [True, True, True, False, False]
    assert out[-1]["source"]["ids"].shape == out[0]["source"]["ids"].shape
    assert np.concatenate([b["index"][b["valid"]] for b in out]).tolist() == list(range(len(ASKED)))
    limited = eval_batches(ASKED, 5, limit=7)
    assert np.concatenate([b["index"][b["valid"]] for b in limited]).tolist() == [0, 3, 6, 9, 13, 16, 19]


def test_evaluation_of_several_processes_gives_each_its_rows_of_every_batch():
    whole = list(eval_batches(ASKED, 9))
    parts = [list(eval_batches(ASKED, 9, share=(number, 3))) for number in range(3)]
    assert all(len(part) == len(whole) for part in parts), "they compute together"
    for key in ("index", "valid"):
        joined = [np.concatenate([one[key] for one in batch]).tolist() for batch in zip(*parts, strict=True)]
        assert joined == [one[key].tolist() for one in whole]
    assert not parts[2][-1]["valid"].any() and parts[2][-1]["source"]["ids"].shape == parts[0][0]["source"]["ids"].shape
    with pytest.raises(UserError, match=r"eval\.batch=5 does not divide by 3"):
        next(eval_batches(ASKED, 5, share=(0, 3)))
