"""lw_jax/data/pairs.py: pairs are read in every form or refused by place and rule, and split by prompt."""

import json
import logging
import random
import re

import pytest

from lw_jax.core.errors import UserError
from lw_jax.data.pairs import Preference, prompt_key, read, split

PLAIN = [{"prompt": f"Question {i}?", "chosen": f"yes {i}", "rejected": f"no {i}", "score": i} for i in range(3)]
USER, CHOSEN, REJECTED = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "assistant", "content": "go away"},
)
TALK = {"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]}
TRANSCRIPT = {
    "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I do",
    "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: I don't",
}


def turn(role, content):
    return {"role": role, "content": content}


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return str(path)


def read_rows(tmp_path, *rows):
    return read(write(tmp_path / "pairs.jsonl", [PLAIN[0] if row is None else row for row in rows]))


def texts(pair):
    return pair.prompt, pair.chosen, pair.rejected


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}])
def test_prompt_of_whole_conversations_is_what_they_begin_with_alike(tmp_path, prompt):
    system = {"role": "system", "content": "be kind"}
    before = [system, USER, CHOSEN, {"role": "user", "content": "and now?"}]
    (pair,) = read_rows(tmp_path, prompt | {"chosen": [*before, CHOSEN], "rejected": [*before, REJECTED]})
    assert [turn["content"] for turn in pair.prompt] == ["be kind", "hi", "hello", "and now?"]
    assert (pair.chosen, pair.rejected) == ((turn("assistant", "hello"),), (turn("assistant", "go away"),))


def test_prompt_of_transcripts_ends_where_the_last_common_reply_begins(tmp_path):
    (pair,) = read_rows(tmp_path, TRANSCRIPT)
    assert texts(pair) == ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " I do", " I don't")


def test_transcripts_that_part_before_the_last_reply_are_counted(tmp_path, caplog):
    early = TRANSCRIPT | {"rejected": "\n\nHuman: a\n\nAssistant: B\n\nHuman: c\n\nAssistant: I do"}
    with caplog.at_level(logging.WARNING):
        read_rows(tmp_path, TRANSCRIPT)
        assert not caplog.text
        read_rows(tmp_path, TRANSCRIPT, early)
    assert "in 1 of 2 pairs a reply holds" in caplog.text


def test_pair_of_equal_replies_is_dropped_and_counted(tmp_path, caplog):
    same = {"prompt": "p", "chosen": "x", "rejected": "x"}
    with caplog.at_level(logging.WARNING):
        found = read_rows(tmp_path, PLAIN[0], same, PLAIN[2] | {"rejected": ""})
    assert [texts(pair) for pair in found] == [("Question 0?", "yes 0", "no 0"), ("Question 2?", "yes 2", "")]
    assert [pair.id.rpartition(":")[2] for pair in found] == ["1", "3"]
    assert "dropped 1 of 3 pairs" in caplog.text
    for row in (same, {"chosen": [USER], "rejected": [USER]}):
        with pytest.raises(UserError, match="no pair left of 2"):
            read_rows(tmp_path, row, row)


def test_turns_keep_all_that_they_have_and_rows_what_the_template_reads(tmp_path):
    said = CHOSEN | {"content": None, "tool_calls": [{"function": {"name": "f"}}], "mood": "glad", "name": None}
    row = TALK | {"chosen": [said], "tools": '[{"name": "f"}]', "chat_template_kwargs": {"x": 1, "y": None}}
    (pair,) = read_rows(tmp_path, row)
    assert pair.chosen == ({key: value for key, value in said.items() if value is not None},)
    assert pair.values == {"tools": [{"name": "f"}], "x": 1}


BROKEN = [
    ({"prompt": "p", "rejected": "b"}, "chosen"),
    ({"prompt": "p", "chosen": "a", "rejected": 7}, "rejected=7"),
    ({"prompt": " \n", "chosen": "a", "rejected": "b"}, "'prompt'"),
    ({"chosen": "a", "rejected": "b"}, "'prompt'"),
    ({"question": "p", "chosen": "a", "rejected": "b"}, "data.columns=prompt:COLUMN"),
    ({"prompt": "p", "chosen": [CHOSEN], "rejected": [REJECTED]}, "mixed forms"),
    (
        {"prompt": "p", "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
        "leave the prompt out: data.columns=prompt:",
    ),
    (TALK | {"chosen": [{"from": "gpt", "value": "x"}]}, "chosen[0]: "),
    (TALK | {"rejected": [{"role": "assistant", "content": [1]}]}, "rejected[0].content[0]=1"),
    (TALK | {"prompt": [USER | {"content": [{"type": "image"}]}]}, "prompt[0].content[0].type='image'"),
    (TALK | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has ['messages']"),
    (TALK | {"chat_template_kwargs": {"documents": 5}}, "documents=5"),
    (TALK | {"prompt": []}, "has no turn"),
    (TALK | {"prompt": [USER, CHOSEN]}, "ends with a turn of 'assistant'"),
    (TALK | {"rejected": [USER, REJECTED]}, "'rejected'"),
]


@pytest.mark.parametrize(("row", "named"), BROKEN, ids=range(len(BROKEN)))
def test_broken_row_is_refused_by_file_line_and_field(tmp_path, row, named):
    first = TALK if isinstance(row, dict) and isinstance(row.get("rejected"), list) else PLAIN[0]
    path = write(tmp_path / "pairs.jsonl", [first, row])
    with pytest.raises(UserError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(named)):
        read(path)


def test_replies_that_begin_with_their_prompt_are_told(tmp_path, caplog):
    read_rows(tmp_path, PLAIN[0], {"prompt": "Why?\n", "chosen": "Why? So.", "rejected": "Why? No."})
    assert "in 1 of 2 pairs both replies begin with their prompt" in caplog.text


@pytest.mark.parametrize("rows", [(PLAIN[0], TALK), (TALK, PLAIN[0]), (PLAIN[0], TRANSCRIPT)])
def test_file_of_mixed_forms_is_refused(tmp_path, rows):
    with pytest.raises(UserError, match=r"pairs.jsonl:2: .*pairs.jsonl:1 is"):
        read_rows(tmp_path, *rows)


# --- split ---


def pairs(prompts, replies=3):
    return [Preference(f"{p}.{i}", f"prompt {p}", f"good {i}", f"bad {i}") for p in prompts for i in range(replies)]


def sides(preferences, share=0.3, seed=5):
    train, held = split(preferences, share, seed)
    assert sorted(pair.id for pair in [*train, *held]) == sorted(pair.id for pair in preferences)
    return {pair.prompt for pair in train}, {pair.prompt for pair in held}


def test_no_prompt_stands_on_both_sides_and_the_share_is_about_kept():
    train, held = sides(pairs(range(500)))
    assert not train & held
    assert 0.25 < len(held) / 500 < 0.35  # 0.3 +- 2.5 standard deviations of 500 draws


def test_side_of_a_prompt_depends_on_the_seed_and_not_on_order_or_other_rows():
    few = pairs(range(41))
    random.Random(3).shuffle(few)
    train, held = sides(few)
    more_train, more_held = sides(pairs(range(-7, 53)))
    assert train <= more_train and held <= more_held
    assert sides(few, seed=6) != (train, held)


def test_white_space_does_not_make_another_prompt():
    spaced = [Preference(pair.id, f"{pair.prompt}\n ".replace(" ", "  "), "a", "b") for pair in pairs(range(53))]
    train, held = split([*pairs(range(53)), *spaced], 0.5, 0)
    assert not {pair.prompt.split()[1] for pair in train} & {pair.prompt.split()[1] for pair in held}


def test_conversations_are_split_by_all_their_turns():
    def talk(i):
        turns = (turn("user", "alike"), turn("assistant", f"reply {i // 2}"), turn("user", "alike"))
        return Preference(str(i), turns, (turn("assistant", "a"),), (turn("assistant", "b"),))

    train, held = split([talk(i) for i in range(60)], 0.5, 0)
    assert (
        train and held and not {prompt_key(pair.prompt) for pair in train} & {prompt_key(pair.prompt) for pair in held}
    )


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9, 0.0, 1.0])
def test_split_that_leaves_a_side_empty_is_refused(share):
    with pytest.raises(UserError, match=f"11|{share}"):
        split(pairs(range(11)), share, 0)
