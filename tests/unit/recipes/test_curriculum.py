"""lw_jax/recipes/curriculum.py: what a run's stages read, what is held out, and when it counts as collapsed."""

import json

import pytest

from lw_jax.data.tokens import Tokenizer
from tests import tiny

STAGES = {
    "stages__align__share": 1 / 6,
    "stages__pretrain__share": 1 / 3,
    "stages__pretrain__lengths": (7, 13, 19),
    "stages__pretrain__reconstruct": 0.25,
    "stages__answer__slots": (2, 5),
    "stages__answer__bits": (8, 4),
    "train__steps": 60,
}


def make(root, **changes):
    return tiny.make_recipe(root, **changes).curriculum


@pytest.fixture(scope="module")
def staged(root):
    return make(root, **STAGES)


def test_stages_follow_each_other_and_their_passages_grow_in_equal_parts(staged):
    phases = staged.data_schedule().phases
    told = [(one.steps, [(encoded.task, weight) for encoded, weight in one.streams]) for one in phases]
    mixture = [("reconstruct", 0.25), ("continuation", 0.75)]
    parts = [(7, mixture), (6, mixture), (7, mixture)]
    assert told == [(10, [("reconstruct", 1.0)]), *parts, (30, [("answer", 1.0)])]
    assert [(one.slots, one.bits) for one in phases] == [*[((), ())] * 4, ((2, 5), (8, 4))]
    lengths = [max(len(ids) - 1 for ids in one.streams[0][0].readers["llama"]["answer"].ids) for one in phases[:4]]
    assert lengths[1] < lengths[2] < lengths[3] < lengths[0] <= 32, "32, then 7, 13 and 19 tokens, words kept whole"


def test_a_document_is_tokenised_once_for_passages_of_all_tasks_and_lengths(root, monkeypatch):
    read, starts = [], Tokenizer.starts
    monkeypatch.setattr(Tokenizer, "starts", lambda self, text: read.append(text) or starts(self, text))
    staged = make(root, **STAGES)
    staged.data_schedule()
    assert len(read) == len({example.context for example in staged.examples("train")})


def test_last_stage_s_task_is_validated_first_and_every_task_also_with_others_sources(staged):
    found = staged.validation()
    tasks = [(prefix, encoded.task) for prefix, encoded in found]
    plain = [("", "answer"), ("", "reconstruct"), ("", "continuation")]
    assert tasks == [*plain, *(("shuffled/", task) for _, task in plain)]


def test_validation_holds_no_text_of_training(staged):
    for task in ("answer", "reconstruct"):
        texts = [{e.context for e in staged.stream(split, task, 19).examples} for split in ("train", "validation")]
        assert texts[0] and texts[1] and not texts[0] & texts[1]


def test_passages_come_from_their_own_file_where_it_is_named(root, tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("\n\n".join(f"Paper number {n} speaks of nothing but rain and wind." for n in range(11)))
    named = make(root, **STAGES | {"data__passages": str(file)})
    texts = [example.context for example in named.stream("train", "reconstruct", 19).examples]
    assert any("Paper number" in text for text in texts) and not any("lives" in text for text in texts)
    held_out = [example.context for example in named.stream("validation", "reconstruct", 19).examples]
    assert not any("Paper number" in text for text in held_out)


def test_one_text_has_no_other_to_be_sent_and_no_collapse_is_seen(root, tmp_path):
    file = tmp_path / "one.jsonl"
    rows = [{"context": "Mara has 3 lamps.", "question": f"How many {n}?", "answers": ["3"]} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    one = make(root, data__validation=str(file))
    assert [prefix for prefix, _ in one.validation()] == [""]
    assert one.collapse(6, {"nll/llama": 0.01, "nll/qwen": 0.02}) == ""
    (told,) = tiny.make_recipe(root, data__validation=str(file), train__alarm_step=6).findings()
    assert str(told).startswith("warning: train.alarm_step=6: it cannot fire in answers, as all 4 ")


def values(gaps, *, base=2.0):
    """A validation's metrics by the gap of each."""
    plain = {name: base for name in gaps}
    return plain | {f"shuffled/{name}": base + gap for name, gap in gaps.items()}


def test_collapse_is_told_only_when_no_reader_gains_from_its_own_text(root):
    plain = make(root)
    none = values({"nll/llama": 0.04, "nll/qwen": -0.01})
    told = plain.collapse(6, none)
    assert told.startswith("collapse at step 6: ")
    assert "nll/llama 2.000 (another text's: +0.040)" in told and "nll/qwen 2.000 (another text's: -0.010)" in told
    assert plain.collapse(6, values({"nll/llama": 0.04, "nll/qwen": 0.051})) == ""
    assert plain.collapse(6, values({"nll/llama": 0.4, "nll/qwen": -0.3})) == ""
    assert plain.collapse(6, values({"nll/llama": float("nan"), "nll/qwen": 0.01})) == "", "a divergence, no collapse"


def test_collapse_asks_the_tasks_of_the_stage_that_the_step_is_in(staged):
    good, bad = 0.5, 0.0

    def told(step, **gaps):
        labels = {"answer": "", "reconstruct": "reconstruct/", "continuation": "continuation/"}
        return staged.collapse(
            step, values({f"{labels[task]}nll/{name}": gap for task, gap in gaps.items() for name in ("llama", "qwen")})
        )

    only_repeats = {"answer": bad, "reconstruct": good, "continuation": bad}
    assert not told(10, **only_repeats) and not told(30, **only_repeats)
    assert "collapse" in told(31, **only_repeats), "the last stage asks questions"
    only_goes_on = {"answer": bad, "reconstruct": bad, "continuation": good}
    assert "reconstruct/nll" in told(10, **only_goes_on), "the first stage repeats only"
    assert not told(11, **only_goes_on)
    assert not told(60, answer=good, reconstruct=bad, continuation=bad)
