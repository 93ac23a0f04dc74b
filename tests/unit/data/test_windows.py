"""lw_jax/data/windows.py: windows of a corpus as a stream, in the order of a seed, with a rate that warms up."""

import numpy as np
import pytest

from lw_jax.data.corpus import Span, pack
from lw_jax.data.tokens import ByteTokenizer
from lw_jax.data.windows import WarmupSchedule, Windows

LENGTH, BATCH = 7, 6


@pytest.fixture
def packed(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i} " for i in range(131)))
    return pack(str(tmp_path / "a.txt"), ByteTokenizer(), root=tmp_path)


@pytest.fixture
def windows(packed):
    return Windows(packed.split(0.25, length=LENGTH)[0], LENGTH, "lm")


def test_windows_are_the_tokens_of_their_span_each_target_once(packed):
    ids = packed.rows([0], packed.tokens)[0]
    for span in packed.split(0.25, length=LENGTH):
        windows = Windows(span, LENGTH, "lm")
        count = (len(span) - 1) // LENGTH
        assert len(windows) == count
        found = windows.collate(range(count))["readers"]["lm"]["ids"]
        assert found.shape == (count, LENGTH + 1) and found.dtype == np.int32
        at = span.start
        np.testing.assert_array_equal(found[:, :-1].ravel(), ids[at : at + count * LENGTH])
        np.testing.assert_array_equal(found[:, 1:].ravel(), ids[at + 1 : at + count * LENGTH + 1])


def test_batch_has_what_a_course_and_a_loss_ask_for(windows):
    one = windows.collate([5, 0, 11])
    fields = one["readers"]["lm"]
    assert one["source"] == {} and one["index"].tolist() == [5, 0, 11] and one["index"].dtype == np.int32
    assert set(fields) == {"ids", "weights", "rate", "task"}
    for name, shape in (("weights", (3, 1)), ("rate", (3,))):
        assert fields[name].dtype == np.float32
        np.testing.assert_array_equal(fields[name], np.ones(shape))
    assert windows.task == "text"


def test_last_window_needs_a_target_for_its_last_input(packed):
    assert [len(Windows(Span(packed, 4, 4 + tokens), LENGTH, "lm")) for tokens in (7, 8, 14, 15, 16)] == [0, 1, 1, 2, 2]


# --- order and pace


def test_rate_rises_evenly_to_one_and_stays(windows):
    data_schedule = WarmupSchedule.of(windows, warmup=10, start=0.2)
    rates = [
        data_schedule.batch(n, global_batch=BATCH, seed=0, share=slice(0, 4))["readers"]["lm"]["rate"]
        for n in range(13)
    ]
    assert all(rate.dtype == np.float32 and rate.shape == (4,) for rate in rates)
    np.testing.assert_array_equal(
        rates, np.repeat(np.minimum(0.2 + 0.08 * np.arange(13), 1).astype(np.float32)[:, None], 4, axis=1)
    )
