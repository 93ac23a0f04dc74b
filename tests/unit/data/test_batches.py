"""lw_jax/data/batches.py: prompts join as they are tokenised, labels shift once, and nothing is cut unseen."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest

from configs import base
from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.core.eval_rows import PROMPT_FIELDS
from lw_jax.core.types import Example
from lw_jax.data import batches, prompt_tokens, question_cards
from lw_jax.data.prompt_tokens import Layout, Reader
from lw_jax.data.tokens import ByteTokenizer, Tokenizer, load_source_tokenizer, load_tokenizer
from lw_jax.recipes import selfmade
from tests import tiny

ANSWER_FIELDS = {"answer_inputs", "targets", "weights"}
SENT = {"channel", "task"}  # how the latents come, and what for
ALL_ROWS = ("text", "latents", "shuffled", "zero", "none", "truncated")

CARDS = question_cards.make(61, facts=4, seed=0, split="train")
TEXTS = [f"Context:\n{e.context}\nQuestion: {e.question}\nAnswer: {e.answers[0]}" for e in CARDS]
SYSTEM = "{% if messages[1:] %}{{ messages[0].content }}{% endif %}"
USER = "{{ messages[-1].content | trim }}"
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
CHAT = f"<s><|user|>{SYSTEM}{USER}<|end|><|bot|>{{{{ '\n' }}}}"


def train(vocab, *, begin="<s>", chat=CHAT):
    """A byte-level BPE trained on cards."""
    with tempfile.TemporaryDirectory() as folder:
        selfmade.write_tokenizer(Path(folder), selfmade.Vocabulary(vocab, begin, "</s>", "<pad>"), TEXTS)
        tokenizer = load_tokenizer(Path(folder))
    tokenizer.backend.chat_template = chat
    return tokenizer


TOK = train(700)
OTHER = train(430, begin="")
WIDTH = 11


def layout(*, readers=None, slots=7, window=512, windows=1, source=None, prompt=None, **data):
    keys = base.get_config()
    return Layout(
        prompt=config.Prompt(**keys.prompt.to_dict() | (prompt or {})),
        readers=readers or {"a": Reader(TOK, "plain"), "b": Reader(OTHER, "chat")},
        source=source or ByteTokenizer(),
        window=window,
        windows=windows,
        slots=slots,
        width=WIDTH,
        data=config.Data(**keys.data.to_dict() | data),
    )


def valid(field, row):
    """The real ids of one row of a collated field."""
    return field["ids"][row][field["mask"][row]].tolist()


def answer_ids(fields, row):
    return fields["targets"][row][fields["weights"][row] > 0].tolist()


@pytest.fixture(scope="module")
def batch():
    return batches.encode(CARDS, layout=layout(), rows=ALL_ROWS).collate(range(len(CARDS)))


def test_prompts_and_answers_equal_the_joint_tokenisation(batch):
    plain, chat = batch["readers"]["a"], batch["readers"]["b"]
    for i, e in enumerate(CARDS):
        asked, answer = f"Context:\n{e.context}\nQuestion: {e.question}", f"\nAnswer: {e.answers[0]}"
        latents = TOK.encode(f"\nQuestion: {e.question}{answer}")
        assert valid(plain["after"], i) + answer_ids(plain, i) == [*latents, TOK.eos]
        text = [*TOK.begin, *TOK.encode(asked + answer), TOK.eos]
        assert valid(plain["text"], i) + answer_ids(plain, i) == text
        rendered = [*OTHER.encode(OTHER.render_chat(asked) + answer), OTHER.eos]
        assert valid(chat["text"], i) + answer_ids(chat, i) == rendered


def test_labels_shift_once_and_eos_is_a_target_but_no_input(batch):
    fields = batch["readers"]["a"]
    for i in range(len(CARDS)):
        answer = answer_ids(fields, i)
        assert answer[-1] == TOK.eos and answer.count(TOK.eos) == 1
        length = len(answer)
        assert fields["targets"][i].tolist() == answer + [TOK.pad] * (fields["targets"].shape[1] - length)
        inputs = fields["answer_inputs"][i].tolist()
        assert inputs == answer[:-1] + [TOK.pad] * (fields["answer_inputs"].shape[1] - length + 1)
        assert fields["weights"][i].tolist() == [1.0] * length + [0.0] * (fields["targets"].shape[1] - length)
    assert len({len(answer_ids(fields, i)) for i in range(len(CARDS))}) > 1  # ragged, or the padding is untested


def test_begin_ids_stand_first_and_once():
    bos = TOK.begin[0]
    readers = {
        "plain": Reader(TOK, "plain"),
        "chat": Reader(TOK, "chat"),  # its template writes <s> itself
        "bare": Reader(train(431, chat=f"<|user|>{USER}<|end|>"), "chat"),  # and this one none
        "none": Reader(OTHER, "plain"),
    }
    out = batches.encode(CARDS[:3], layout=layout(readers=readers), rows=ALL_ROWS).collate([2, 0])["readers"]
    for name, expected in (("plain", 1), ("chat", 1), ("bare", 0), ("none", 0)):
        for key in ("before", "text", "none", "truncated"):
            ids = valid(out[name][key], 0)
            assert (ids.count(bos), ids[0] == bos) == (expected, bool(expected)), (name, key)
        assert bos not in valid(out[name]["after"], 0)


@pytest.mark.parametrize(
    ("reader", "anchor", "gold", "answer"),
    [
        (Reader(TOK, "plain"), "\nAnswer:", "Lisbon", " Lisbon"),
        (Reader(TOK, "plain"), "", "Lisbon", " Lisbon"),
        (Reader(TOK, "plain"), "\n", "Lisbon", "Lisbon"),
        (Reader(TOK, "chat"), "", "Lisbon", "Lisbon"),  # the template ends with a line break
        (Reader(train(430, chat=f"<s>{USER}<|bot|>"), "chat"), "", "Lisbon", "Lisbon"),
        (Reader(train(430, chat=LLAMA2), "chat"), "", "Lisbon", " Lisbon"),
        (Reader(TOK, "chat"), "Answer:", "Lisbon", " Lisbon"),
        (Reader(TOK, "plain"), "\nAnswer:", "Lisbon</s>", " Lisbon"),  # which brings its own end
    ],
)
def test_space_before_the_answer_follows_the_end_of_the_prompt(reader, anchor, gold, answer):
    spec = layout(readers={"a": reader}, prompt={"anchor": anchor})
    fields = batches.encode([Example("x", "c", "q?", (gold,))], layout=spec).collate([0])["readers"]["a"]
    assert answer_ids(fields, 0) == [*reader.tokenizer.encode(answer), reader.tokenizer.eos]


@pytest.mark.parametrize(("template", "end"), [("chat", "<pad>"), ("plain", "</s>")])
def test_an_answer_ends_as_the_chat_template_ends_a_turn(template, end):
    tokenizer = train(430, chat="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<pad>\n</s>{% endfor %}")
    tokenizer = dataclasses.replace(tokenizer, stops=(*tokenizer.stops, tokenizer.pad))
    spec = layout(readers={"a": Reader(tokenizer, template)}, prompt={"system": "", "anchor": ""})
    fields = batches.encode([Example("x", "c", "q?", ("Lisbon",))], layout=spec).collate([0])["readers"]["a"]
    assert answer_ids(fields, 0)[-1] == tokenizer.backend.convert_tokens_to_ids(end)


def test_anchor_with_trailing_space_drops_exactly_the_answers_that_merge_with_it():
    spec = layout(readers={"a": Reader(TOK, "plain")}, prompt={"anchor": "\nAnswer: "})
    stem = TOK.encode("\nAnswer: ")
    clean = [e for e in CARDS if TOK.encode(f"\nAnswer: {e.answers[0]}")[: len(stem)] == stem]
    merging = [e for e in CARDS if e not in clean]
    assert clean and merging  # this tokenizer joins the space to some words and not to others
    encoded = batches.encode(CARDS, layout=spec)
    assert (list(encoded.examples), encoded.counts["boundary"]) == (clean, len(merging))
    with pytest.raises(UserError, match=rf"none of {len(merging)} .*prompt\.anchor.*'{merging[0].id}'.*'\\nAnswer: '"):
        batches.encode(merging, layout=spec)


def test_none_keeps_the_question_and_truncated_the_first_slots_tokens_too(batch):
    slots = 7
    for name, tokenizer in (("a", TOK), ("b", OTHER)):
        fields = batch["readers"][name]
        for i, e in enumerate(CARDS):
            before, after = valid(fields["before"], i), valid(fields["after"], i)
            assert valid(fields["truncated"], i) == before + tokenizer.encode(e.context)[:slots] + after
            assert e.question in tokenizer.decode(valid(fields["none"], i))
            assert e.answers[0] not in tokenizer.decode(valid(fields["none"], i))
    assert "Context:\n\nQuestion:" in TOK.decode(valid(batch["readers"]["a"]["none"], 0))


def test_a_context_alone_has_the_ids_of_the_whole_prompt_s(sentencepiece):
    spec = layout(readers={"a": Reader(sentencepiece, "plain")})
    fields = batches.encode([Example("x", "a dog", "q", ("a",))], layout=spec, rows=("text", "context", "truncated"))
    out = fields.collate([0])["readers"]["a"]
    whole, after = valid(out["text"], 0), valid(out["after"], 0)
    assert [*valid(out["context"], 0), *after] == valid(out["truncated"], 0) == whole


def test_padding_side_dtype_and_width(batch):
    for fields in batch["readers"].values():
        for key in ("before", "after", "text", "none", "truncated"):
            ids, mask = fields[key]["ids"], fields[key]["mask"]
            assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
            assert (np.diff(mask.astype(int), axis=1) >= 0).all()  # left: once valid, valid to the end
            longest = mask.sum(1).max()
            assert ids.shape == mask.shape == (len(CARDS), -(-longest // 8) * 8)
        assert (fields["targets"].dtype, fields["answer_inputs"].dtype) == (np.int32, np.int32)
        assert fields["weights"].dtype == np.float32
        assert fields["answer_inputs"].shape[1] == fields["targets"].shape[1] - 1
    assert (np.diff(batch["source"]["mask"].astype(int), axis=1) <= 0).all()
    assert (batch["source"]["ids"][~batch["source"]["mask"]] == ByteTokenizer().pad).all()
    assert (batch["index"].dtype, batch["index"].tolist()) == (np.int32, list(range(len(CARDS))))


def test_prompt_rows_are_in_the_batch_only_when_asked():
    encoded = batches.encode(CARDS[:5], layout=layout(), rows=("latents", "text", "zero"))
    assert "text" in encoded.collate([1])["readers"]["a"]
    assert set(encoded.collate([1], rows=())["readers"]["a"]) == ANSWER_FIELDS | SENT | {"before", "after"}
    assert set(encoded.collate([1], rows=("latents",))["readers"]["a"]) == ANSWER_FIELDS | SENT | {"before", "after"}


def test_dropped_example_is_dropped_for_every_reader_and_index_follows():
    long = dataclasses.replace(CARDS[1], question="Where " * 40 + "?")
    asked = [CARDS[0], long, CARDS[2]]
    encoded = batches.encode(asked, layout=layout(question_tokens=60))
    out = encoded.collate([1])
    assert (encoded.counts["question"], len(encoded)) == (1, 2)
    assert encoded.examples[out["index"][0]] == CARDS[2]
    assert CARDS[2].question in OTHER.decode(valid(out["readers"]["b"]["after"], 0))


def test_overlong_answer_is_dropped_counting_eos():
    readers = {"a": Reader(TOK, "plain")}
    length = len(batches.encode(CARDS[:1], layout=layout(readers=readers)).readers["a"]["answer"].ids[0])
    kept = layout(readers=readers, answer_tokens=length)
    assert batches.encode(CARDS[:1], layout=kept).collate([0])["readers"]["a"]["targets"].shape == (1, length)
    with pytest.raises(UserError, match=rf"{length} tokens of reader 'a', config\.data\.answer_tokens={length - 1}"):
        batches.encode(CARDS[:1], layout=layout(readers=readers, answer_tokens=length - 1))


LONG = dataclasses.replace(CARDS[3], id="long", context=CARDS[3].context * 7)


@pytest.mark.parametrize(
    ("limits", "key"),
    [({"window": 300}, "encoder.window=300"), ({"window": 2000, "context_tokens": 120}, "data.context_tokens=120")],
)
def test_overlong_context_is_refused_by_name_or_dropped_and_counted(limits, key):
    asked = [CARDS[0], LONG, CARDS[2]]
    with pytest.raises(UserError, match=f"'long'.*config.{key}"):
        batches.encode(asked, layout=layout(**limits), rows=("text",))
    encoded = batches.encode(asked, layout=layout(**limits, overlong="drop"), rows=("text",))
    assert encoded.examples == (CARDS[0], CARDS[2]) and encoded.counts["context"] == 1


def test_cut_keeps_the_question_fills_the_limit_and_is_counted():
    spec = layout(window=300, context_tokens=120, overlong="cut")
    encoded = batches.encode([CARDS[0], LONG], layout=spec, rows=("text",))
    out = encoded.collate([1, 0])
    assert bytes(valid(out["source"], 0)).decode() == LONG.context[:300]
    for name, tokenizer in (("a", TOK), ("b", OTHER)):
        ids = valid(out["readers"][name]["text"], 0)
        text = tokenizer.decode(ids)
        assert LONG.question in text and text.endswith("\nAnswer:") and 115 < len(ids) <= 120
        assert LONG.context.startswith(text.split("Context:\n")[1].split("\nQuestion:")[0])
    assert (encoded.counts["source_cut"], encoded.counts["text_cut"], encoded.counts["kept"]) == (1, 1, 2)


def test_texts_are_cut_together_and_few_whole_prompts_are_in_memory(monkeypatch):
    asked = [dataclasses.replace(LONG, id=str(n), context=f"{n} {LONG.context}") for n in range(20)]
    spec = layout(overlong="cut", context_tokens=120)
    prompts, encode_batch = [], Tokenizer.encode_batch

    def counted(self, texts):
        prompts.append(sum("Context:" in text for text in texts))
        return encode_batch(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    together = batches.encode(asked, layout=spec, rows=("text",))
    assert together.counts["text_cut"] == 20 == max(prompts) and len(prompts) < 2 * 20
    prompts.clear()
    monkeypatch.setattr(prompt_tokens, "PROMPTS", 3)
    apart = batches.encode(asked, layout=spec, rows=("text",))
    assert (apart.digest(), apart.counts) == (together.digest(), together.counts) and max(prompts) == 3


@pytest.mark.parametrize("windows", [1, 3])
def test_each_window_of_a_bert_encoder_stands_between_its_marks(tmp_path, windows):
    tiny.write_bert(tmp_path)
    spec = layout(source=load_source_tokenizer(tmp_path), window=6, windows=windows, overlong="cut")
    (whole,) = spec.source.encode_batch([CARDS[0].context])
    source = batches.encode([CARDS[0]], layout=spec, rows=()).collate([0])["source"]
    rows = np.array(valid(source, 0)).reshape(windows, 6)
    assert (rows[:, 0] == 2).all() and (rows[:, -1] == 3).all()
    assert rows[:, 1:-1].ravel().tolist() == whole[1 : 1 + 4 * windows].tolist()
    short = dataclasses.replace(CARDS[0], context=spec.source.backend.decode(whole[1 : 4 * windows]))
    source = batches.encode([short], layout=spec, rows=()).collate([0])["source"]
    assert valid(source, 0)[-4:] == [*whole[4 * windows - 3 : 4 * windows].tolist(), 3], "no window of marks alone"


@pytest.mark.parametrize("row", ["text", "context"])
def test_a_prompt_without_room_for_its_text_is_dropped(row):
    bare = batches.encode([dataclasses.replace(CARDS[0], context="")], layout=layout(), rows=("text",)).readers.values()
    for limit in (40, max(len(fields["text"].ids[0]) for fields in bare)):
        with pytest.raises(UserError, match="none of 1 examples"):
            batches.encode([CARDS[0]], layout=layout(context_tokens=limit, overlong="cut"), rows=(row,))


def test_single_prompt_equals_the_data_set_without_answers():
    e = CARDS[4]
    alone = batches.encode_prompt(f" {e.context}\n", e.question, layout=layout(), rows=ALL_ROWS)
    listed = batches.encode([e], layout=layout(), rows=ALL_ROWS).collate([0])
    for fields in listed["readers"].values():
        for key in ANSWER_FIELDS:
            del fields[key]
    np.testing.assert_equal(alone, listed)
    for overlong in ("refuse", "drop"):
        with pytest.raises(UserError, match=r"config\.encoder\.window=300"):
            batches.encode_prompt(LONG.context, e.question, layout=layout(window=300, overlong=overlong))
    with pytest.raises(UserError, match="question"):
        batches.encode_prompt(e.context, " ", layout=layout())


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ([], "none of 0"),
        (CARDS[:2], "'cards/train/0/0'"),  # longer than the limit without any context
    ],
)
def test_what_leaves_nothing_to_learn_is_refused(asked, named):
    with pytest.raises(UserError, match=named):
        batches.encode(asked, layout=layout(context_tokens=9, overlong="cut"), rows=("text",))


@pytest.mark.parametrize(
    ("chat", "named"),
    [
        (USER + USER, r"config\.llms\.r"),
        (SYSTEM, r"config\.llms\.r"),
        (USER, r"config\.prompt\.system="),
        (SYSTEM + "{{ messages[-1].content[:60] }}", r"config\.prompt\.user="),
    ],
)
def test_template_that_repeats_or_loses_what_is_said_is_refused(chat, named):
    prompt = {"system": "Be brief.", "user": "{context}{question}" + "x" * 60} if "prompt" in named else {}
    spec = layout(readers={"r": Reader(train(430, chat=chat), "chat")}, prompt=prompt)
    with pytest.raises(UserError, match=named):
        batches.encode(CARDS[:1], layout=spec)


def test_braces_in_text_and_prompt_are_kept_as_they_are():
    e = Example("x", "{question} {0}", "What {context}?", ("y",))
    spec = layout(prompt={"user": '{{"text": "{context}"}}\n{question}'})
    out = batches.encode([e], layout=spec, rows=("text",)).collate([0])["readers"]["a"]
    assert TOK.decode(valid(out["text"], 0)) == '{"text": "{question} {0}"}\nWhat {context}?\nAnswer:'


@pytest.mark.parametrize("overlong", ["drop", "cut"])
def test_beginning_alone_is_read_and_gives_what_the_whole_row_gives(monkeypatch, overlong):
    long = dataclasses.replace(LONG, id="long", context=" ".join(card.context for card in CARDS[:40]))
    asked = [CARDS[0], long, *CARDS[3:9], dataclasses.replace(CARDS[9], question=long.context)]
    found = []
    for widest, margin in ((prompt_tokens.WIDEST, prompt_tokens.MARGIN), (2, 20)):
        monkeypatch.setattr(prompt_tokens, "WIDEST", widest)
        monkeypatch.setattr(prompt_tokens, "MARGIN", margin)
        seen = []

        class Counting(ByteTokenizer):
            def encode_batch(self, texts, seen=seen):
                seen.append(sum(map(len, texts)))
                return super().encode_batch(texts)

        spec = layout(source=Counting(), overlong=overlong, context_tokens=130)
        encoded = batches.encode(asked, layout=spec, rows=PROMPT_FIELDS)
        found.append((encoded.digest(), encoded.counts, sum(seen)))
    (*whole, all_of_it), (*cut, seen) = found
    assert cut == whole and seen < all_of_it / 2


def test_the_text_of_several_questions_is_tokenised_once_and_is_in_memory_once(monkeypatch):
    read, encode_batch = [], ByteTokenizer.encode_batch

    def counted(self, texts):
        read.extend(texts)
        return encode_batch(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", counted)
    ids = prompt_tokens.tokenize(ByteTokenizer(), ["Ann.", "Bo.", "Ann."], limit=9)
    assert read == ["Ann.", "Bo."] and [bytes(row.tolist()) for row in ids] == [b"Ann.", b"Bo.", b"Ann."]
    assert ids[0] is ids[2]


def test_text_of_several_windows_is_as_wide_as_whole_windows_and_limited_by_them():
    spec = layout(window=100, windows=10)
    encoded = batches.encode([CARDS[0], LONG], layout=spec)
    source = encoded.collate([1])["source"]
    assert source["ids"].shape[1] == -(-len(LONG.context) // 100) * 100 > 300
    assert bytes(valid(source, 0)).decode() == LONG.context
    with pytest.raises(UserError, match=r"'long': .*limit config\.encoder\.window=100 x windows=3; "):
        batches.encode([CARDS[0], LONG], layout=layout(window=100, windows=3))
    cut = batches.encode([LONG], layout=layout(window=100, windows=3, overlong="cut"))
    assert bytes(valid(cut.collate([0])["source"], 0)).decode() == LONG.context[:300]


class Counted(str):
    """A text that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __ne__(self, other):
        Counted.compared += 1
        return str(self) != str(other)


def test_other_examples_are_the_next_ones_and_few_texts_are_compared():
    rng = np.random.default_rng(0)
    for count in range(9):
        names = rng.choice(list("abc")[: 1 + count % 3], count)
        wanted = [
            next((j % count for j in range(i, i + count) if names[j % count] != name), i)
            for i, name in enumerate(names)
        ]
        assert batches.other_examples([Example("", str(name), "?", ("answer",)) for name in names]) == wanted
    for last in "ab":
        Counted.compared, names = 0, ["a"] * 99 + [last]
        batches.other_examples([Example("", Counted(name), "?", ("answer",)) for name in names])
        assert Counted.compared <= 2 * len(names)


def test_shuffled_sends_another_example_s_context_and_changes_nothing_else():
    twice = [CARDS[0], dataclasses.replace(CARDS[0], id="same card"), *CARDS[1:5]]
    encoded = batches.encode(twice, layout=layout())
    shuffled = encoded.shuffled()
    for i, e in enumerate(twice):
        one, other = encoded.collate([i]), shuffled.collate([i])
        sent = bytes(valid(other["source"], 0)).decode()
        assert sent != e.context and sent in {e.context for e in twice}
        np.testing.assert_equal(one["readers"], other["readers"])
    alone = batches.encode(twice[:2], layout=layout())  # no other context: nothing else can be sent
    np.testing.assert_equal(alone.shuffled().collate([0, 1]), alone.collate([0, 1]))
