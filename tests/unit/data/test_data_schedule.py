"""lw_jax/data/data_schedule.py: any batch by its number, mixtures in exact shares, examples sent in drawn shapes."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.core.types import EXACT, Example
from lw_jax.data.batches import Encoded, Field
from lw_jax.data.data_schedule import DataSchedule, Phase, refuse_small
from lw_jax.data.loader import Loader

BATCH = 6
SLOTS, WIDTH = 8, 11


def encoded(count, task):
    def field(left):
        return Field([np.arange(1 + i % 5, dtype=np.int32) for i in range(count)], 8, -1, left)

    examples = tuple(Example(f"{task} {i}", "c", "q", ("a",)) for i in range(count))
    readers = {"a": {"before": field(True), "after": field(True), "answer": field(False)}}
    return Encoded(examples, field(False), readers, {}, slots=SLOTS, width=WIDTH, task=task)


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


def loader(seed=3, **processes):
    return Loader(COURSE, global_batch=BATCH, seed=seed, **processes)


def test_iterating_gives_the_batch_of_each_number():
    found = list(itertools.islice(loader(), 61))
    for number in (60, 0, 4, 5, 33, 34, 47, 7):  # in no order, about every border
        np.testing.assert_equal(batch(number), found[number])
    assert [task_of(one) for one in found[:5]] == ["reconstruct"] * 5


@pytest.mark.parametrize("weights", [(0.97, 0.02, 0.01), (5.0, 0.25, 2.0)])
def test_every_beginning_of_a_stretch_has_its_shares_within_one_batch(weights):
    streams = (ASKED, REPEATED, CONTINUED)
    data_schedule = DataSchedule((Phase(101, tuple(zip(streams, weights, strict=True))),))
    used, shares = collections.Counter(), np.array(weights) / sum(weights)
    for number in range(101):
        used[task_of(batch(number, data_schedule=data_schedule))] += 1
        counts = np.array([used[one.task] for one in streams])
        assert np.abs(counts - shares * (number + 1)).max() < 1, number


def test_each_stream_gives_each_example_once_an_epoch_across_all_stretches():
    seen = collections.defaultdict(list)
    for number in range(120):
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
    again, half = loader(), loader(process_index=1, process_count=2)
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
        refuse_small(COURSE, 8)
    refuse_small(COURSE, 7)
