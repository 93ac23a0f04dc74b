"""The wire's gates, and proof that each turns red when its defect is planted."""

import numpy as np
import pytest

from lw_jax.data import batches
from lw_jax.models import decoder, rotary
from tests import gates, tiny


@pytest.fixture
def fresh(root):
    """A recipe of its own for each defect, or a program traced without it would be taken."""
    return tiny.make_recipe(root, only="qwen")


@pytest.fixture(scope="module")
def recipe(root):
    return tiny.make_recipe(root)


def test_replayed_embeddings_equal_ids_in_ragged_batches(recipe):
    gates.replayed_embeddings_equal_ids(recipe)


def test_a_dropped_mask_turns_the_replay_gate_red(fresh, monkeypatch):
    kept = decoder._attention_mask
    monkeypatch.setattr(decoder, "_attention_mask", lambda mask, *rest, **named: kept(mask | True, *rest, **named))
    with pytest.raises(AssertionError):
        gates.replayed_embeddings_equal_ids(fresh)


def test_a_swapped_axis_turns_the_replay_gate_red(fresh, monkeypatch):
    rotate = rotary.rotate
    # Rotary angles along heads instead of positions: the shapes agree only after a transpose, so swap inside.
    monkeypatch.setattr(rotary, "rotate", lambda x, cos, sin: rotate(x, cos[:, ::-1], sin[:, ::-1]))
    with pytest.raises(AssertionError):
        gates.replayed_embeddings_equal_ids(fresh)


def test_a_label_shift_changes_the_text_nll(fresh, root, monkeypatch):
    right = gates.text_nll(fresh)
    shift = batches._shift

    def shifted_twice(answer, pad):
        fields = shift(answer, pad)
        return fields | {"targets": np.roll(fields["targets"], -1, axis=1)}

    monkeypatch.setattr(batches, "_shift", shifted_twice)
    for name, wrong in gates.text_nll(tiny.make_recipe(root, only="qwen")).items():
        assert (np.abs(wrong - right[name]) > 0.1).mean() > 0.5


def test_an_answer_reaches_nothing_that_the_wire_sends(recipe):
    """B12: other answers, same everything else."""
    encoded = recipe.data("validation", rows=("text",))
    changed = [type(e)(e.id, e.context, e.question, ("another answer",)) for e in encoded.examples]
    other = batches.encode(changed, layout=recipe.layout, rows=("text",))
    for index in range(len(encoded)):
        ours, theirs = encoded.collate([index]), other.collate([index])
        np.testing.assert_array_equal(ours["source"]["ids"], theirs["source"]["ids"])
        for name in ours["readers"]:
            for field in ("before", "after", "text"):
                np.testing.assert_array_equal(
                    ours["readers"][name][field]["ids"], theirs["readers"][name][field]["ids"]
                )


def test_the_question_is_text_after_the_latents_in_every_example(recipe):
    encoded = recipe.data("validation")
    for index, example in enumerate(encoded.examples):
        for name, fields in encoded.collate([index])["readers"].items():
            ids = fields["after"]["ids"][fields["after"]["mask"]]
            assert example.question in recipe.tokenizers[name].decode(ids.tolist())
