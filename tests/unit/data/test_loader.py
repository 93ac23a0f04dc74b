"""lw_jax/data/loader.py: the order depends on the seed alone, and a restored place is exact."""

import jax
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data.batches import Encoded, Field, fill, weigh
from lw_jax.data.data_schedule import DataSchedule
from lw_jax.data.loader import Loader, eval_batches

N, BATCH = 23, 6


def encoded(n=N):
    def field(scale, left):
        return Field([np.arange(1 + i % 5, dtype=np.int32) + scale * i for i in range(n)], 8, -1, left)

    examples = tuple(Example(str(i), "c", "q", ("a",)) for i in range(n))
    readers = {"a": {"before": field(2, True), "after": field(3, True), "answer": field(5, False)}}
    return Encoded(examples, field(7, False), readers, {}, slots=5, width=3)


def data_schedule(n=N):
    return DataSchedule.of(encoded(n))


def indices(loader, count):
    return [next(loader)["index"].tolist() for _ in range(count)]


def test_order_is_a_function_of_the_seed():
    runs = [indices(Loader(data_schedule(), global_batch=BATCH, seed=seed), 9) for seed in (4, 4, 5)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("count", [2, 4])
def test_shares_of_all_processes_are_the_batch_of_one(count):
    data = encoded()
    one = DataSchedule.of(data)
    whole = Loader(one, global_batch=BATCH, seed=2)
    parts = [Loader(one, global_batch=BATCH, seed=2, process_index=p, process_count=count) for p in range(count)]
    for _ in range(7):
        expected = next(whole)
        shares = [next(part) for part in parts]
        assert {len(share["index"]) for share in shares} <= {BATCH // count, -(-BATCH // count)}
        assert np.concatenate([s["index"] for s in shares]).tolist() == expected["index"].tolist()
        targets = np.concatenate([s["readers"]["a"]["targets"] for s in shares])
        np.testing.assert_array_equal(targets, expected["readers"]["a"]["targets"])
        source = np.concatenate([s["source"]["ids"] for s in shares])
        np.testing.assert_array_equal(source, data.collate(expected["index"])["source"]["ids"])


@pytest.mark.parametrize("change", [{"n": N + 1}, {"global_batch": 3}, {"seed": 9}])
def test_state_of_another_order_is_refused_by_name(change):
    state = Loader(data_schedule(), global_batch=BATCH, seed=3).state()
    options = {"n": N, "global_batch": BATCH, "seed": 3} | change
    other = Loader(data_schedule(options.pop("n")), **options)
    with pytest.raises(UserError, match="examples=.23.|global_batch=6|seed=3"):
        other.restore(state)


@pytest.mark.parametrize(
    ("batch", "processes", "named"), [(29, 1, "23 .*global_batch=29"), (BATCH, 7, r"global_batch=6\b.*\b7")]
)
def test_batch_that_data_or_processes_cannot_have_is_refused_with_both_numbers(batch, processes, named):
    with pytest.raises(UserError, match=named):
        Loader(data_schedule(), global_batch=batch, seed=0, process_count=processes)


def test_filled_batch_repeats_its_last_example_without_weight():
    batch = encoded().collate([3, 20, 7])
    filled = fill(batch, 5)
    assert filled["index"].tolist() == [3, 20, 7, 7, 7]
    repeated = weigh(encoded().collate([3, 20, 7, 7, 7]), np.arange(5) < 3)
    jax.tree.map(np.testing.assert_array_equal, filled, repeated)
    assert filled["readers"]["a"]["weights"].any(axis=1).tolist() == [True, True, True, False, False]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf: leaf[:3], filled), batch)
    assert fill(batch, 3) is batch


def test_evaluation_keeps_the_order_and_marks_the_filling():
    out = list(eval_batches(encoded(), 5))
    assert out[-1]["index"].tolist() == [20, 21, 22, 22, 22]
    assert out[-1]["valid"].tolist() == [True, True, True, False, False]
    assert out[-1]["source"]["ids"].shape == out[0]["source"]["ids"].shape
    assert np.concatenate([b["index"][b["valid"]] for b in out]).tolist() == list(range(N))
    limited = eval_batches(encoded(), 5, limit=7)
    assert np.concatenate([b["index"][b["valid"]] for b in limited]).tolist() == [0, 3, 6, 9, 13, 16, 19]


def test_evaluation_of_several_processes_gives_each_its_rows_of_every_batch():
    whole = list(eval_batches(encoded(), 9))
    parts = [list(eval_batches(encoded(), 9, share=(number, 3))) for number in range(3)]
    assert all(len(part) == len(whole) for part in parts), "they compute together"
    for key in ("index", "valid"):
        joined = [np.concatenate([one[key] for one in batch]).tolist() for batch in zip(*parts, strict=True)]
        assert joined == [one[key].tolist() for one in whole]
    assert not parts[2][-1]["valid"].any() and parts[2][-1]["source"]["ids"].shape == parts[0][0]["source"]["ids"].shape
    with pytest.raises(UserError, match=r"eval\.batch=5 does not divide by 3"):
        next(eval_batches(encoded(), 5, share=(0, 3)))
