"""lw_jax/recipes/surprisal.py: NLL under the whole pretrained body, read once, the same on any number of devices."""

import jax
import numpy as np
import pytest

import lw_jax
from lw_jax.data import question_cards
from lw_jax.recipes.surprisal import Surprisal
from sharding import mesh, placement
from tests import tiny

HALF = 2.0**-11  # relative: NLL is kept in fp16
SAME = 1e-5  # nats
WINDOW = 24


pytestmark = pytest.mark.usefixtures("cache")


def make(root, devices=1, **changes):
    source = tiny.readers(root)["llama"]
    changes = {"encoder__kind": "lm", "encoder__source": str(source), "encoder__window": WINDOW} | changes
    cfg = tiny.make_config(root, encoder__windows=4, compute__dtype="fp32", **changes)
    learner = mesh.make(data=devices, devices=jax.devices()[:devices])
    return Surprisal(cfg, source, placement.one_mesh(learner, ["llama"]))


TEXTS = [example.context for example in question_cards.make(5, facts=1, seed=3, split="train")]
LONG = " ".join(TEXTS)


def expected(root, ids, first=0):
    """NLL of ids behind BOS, from whole logits; those from `first` on."""
    lm = lw_jax.load_lm(tiny.readers(root)["llama"], arithmetic="fp32")
    inputs = np.array([[*lm.tokenizer.begin, *ids]])
    logp = np.asarray(jax.nn.log_softmax(lm.logits(inputs)[0], axis=1))
    lead = len(lm.tokenizer.begin) - 1
    return -logp[np.arange(lead, lead + len(ids)), ids][first:]


def test_nll_is_that_of_the_whole_model_in_windows_that_overlap_by_half(root):
    found = make(root, encoder__layers=1)  # of the encoder; surprisal takes both
    ids = found.tokenizer.encode(LONG)
    assert 3 * WINDOW < len(ids)
    short, long = found.score([TEXTS[0][:20], LONG])
    first = found.tokenizer.encode(TEXTS[0][:20])
    assert len(first) < WINDOW
    np.testing.assert_allclose(short.values, expected(root, first), rtol=HALF, atol=SAME)
    assert short.values.std() > 0.3
    half = WINDOW // 2
    np.testing.assert_allclose(long.values[:WINDOW], expected(root, ids[:WINDOW]), rtol=HALF, atol=SAME)
    second = expected(root, ids[half : half + WINDOW], half)
    np.testing.assert_allclose(long.values[WINDOW : WINDOW + half], second, rtol=HALF, atol=SAME)
    assert len(long.values) == min(len(ids), 4 * WINDOW)
    assert "".join(LONG[a:b] for a, b in long.spans) == LONG[: long.spans[-1, 1]]


def test_each_text_is_read_once_in_any_order_and_on_any_devices(root, monkeypatch, tmp_path):
    first = make(root).score([*TEXTS, TEXTS[0]])
    again = make(root, devices=2)
    monkeypatch.setattr(again, "_read", lambda windows: pytest.fail("read again"))
    back = again.score(TEXTS[::-1])[::-1]
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "other"))
    four = make(root, devices=4).score(TEXTS)
    for a, b, c in zip(first, back, four, strict=False):
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.values, c.values)


def test_text_with_its_own_beginning_is_read_as_without(root):
    found = make(root)
    begin = found.tokenizer.backend.bos_token
    marked, plain = found.score([begin + TEXTS[0], TEXTS[0]])
    np.testing.assert_array_equal(marked.values, plain.values)
    np.testing.assert_array_equal(marked.spans - len(begin), plain.spans)
