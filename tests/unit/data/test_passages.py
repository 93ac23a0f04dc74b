"""lw_jax/data/passages.py: documents in pieces that lose no word, and what a reader is asked to do with them."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.core.types import Task
from lw_jax.data import batches, passages, question_cards
from tests import tiny

LENGTH = 13


@pytest.fixture(scope="module")
def recipe(root):
    return tiny.make_recipe(root, encoder__window=512)


@pytest.fixture(scope="module")
def tokenizer(recipe):
    return recipe.tokenizers["llama"]


@pytest.fixture(scope="module")
def documents():
    """Three texts of unequal length, about 40 to 200 tokens."""
    made = [example.context for example in question_cards.make(29, facts=2, seed=5, split="train")]
    return [" ".join(made[:3]), "\n".join(made[3:14]), "  ".join(made[14:29])]


@pytest.mark.parametrize("length", [13, 19, 29])
def test_pieces_are_the_document_s_words_in_order_and_about_so_long(documents, tokenizer, length):
    for document in documents:
        pieces, words = passages.cut(document, length, tokenizer.starts), document.split()
        kept = " ".join(pieces).split()
        assert kept == words[: len(kept)], "no word is cut, lost or moved"
        left = len(tokenizer.encode(" ".join(words[len(kept) :])))
        assert left <= passages.SHORTEST * length + 1, "only a short rest is left out"
        lengths = [len(tokenizer.encode(piece)) for piece in pieces]
        longest_word = max(len(tokenizer.encode(" " + word)) for word in words)
        assert len(pieces) > 1 and max(lengths) <= length + longest_word
        assert all(abs(count - length) <= longest_word for count in lengths[:-1])


def test_a_few_pieces_of_long_words_do_not_widen_every_batch(recipe, documents, tokenizer):
    found = passages.reconstructions([" ".join(documents * 20)], LENGTH, tokenizer.starts)
    odd = dataclasses.replace(found[0], id="odd", context="x" * 200, answers=("x" * 200,))
    plain = passages.encode(found, layout=recipe.layout, task="reconstruct")
    encoded = passages.encode([*found, odd], layout=recipe.layout, task="reconstruct")
    assert len(found) > 200, "one is less than a hundredth"
    assert encoded.counts["outlier"] >= 1 and "odd" not in {example.id for example in encoded.examples}
    assert encoded.source.width == plain.source.width
    tokenizers = 1 + len(recipe.layout.readers)
    assert len(encoded) >= (1 - tokenizers * (1 - passages.KEPT)) * len(found)


def test_short_document_stays_whole_and_one_without_spaces_is_cut_all_the_same(tokenizer):
    assert passages.cut("Mara lives in Lisbon.", 500, tokenizer.starts) == ["Mara lives in Lisbon."]
    solid = "Mara" * 31
    pieces = passages.cut(solid, LENGTH, tokenizer.starts)
    assert len(pieces) > 2 and solid.startswith("".join(pieces))
    first = passages.continuations([solid], LENGTH, tokenizer.starts)[0]
    assert solid.startswith(first.context + first.answers[0]), "no blank stands where the text has none"


def test_reconstruction_s_text_is_its_own_answer_and_repeated_documents_count_once(documents, tokenizer):
    once = passages.reconstructions(documents, LENGTH, tokenizer.starts)
    assert once == passages.reconstructions([*documents, documents[1]], LENGTH, tokenizer.starts)
    assert all(example.answers == (example.context,) and example.question == "" for example in once)
    assert len({example.id for example in once}) == len(once) > 10


def test_continuations_are_pieces_that_follow_each_other_in_one_document(documents, tokenizer):
    found = passages.continuations(documents, LENGTH, tokenizer.starts)
    pieces = [passages.cut(document, LENGTH, tokenizer.starts) for document in documents]
    expected = [(a.strip(), b) for each in pieces for a, b in zip(each, each[1:], strict=False)]
    assert all(after.startswith(" ") for _, after in expected), "a word begins there"
    assert [(example.context, example.answers[0]) for example in found] == expected
    assert passages.continuations([*documents, documents[0]], LENGTH, tokenizer.starts) == found


@pytest.mark.parametrize("count", [1, 2])
def test_other_text_of_a_continuation_is_not_what_continues_it(documents, tokenizer, count):
    found = passages.continuations(documents[:count], 7, tokenizer.starts)
    first = len(passages.continuations(documents[:1], 7, tokenizer.starts))
    assert first > 3
    for index, other in enumerate(batches.other_examples(found)):
        assert found[other].context not in (found[index].context, found[index].answers[0].strip())
        assert count == 1 or (other < first) != (index < first)


def test_continuation_of_a_short_document_is_its_second_half(documents, tokenizer):
    (only,) = passages.continuations(documents[:1], 500, tokenizer.starts)
    assert f"{only.context} {only.answers[0]}".split() == documents[0].split()
    sizes = [len(tokenizer.encode(text)) for text in (only.context, only.answers[0])]
    assert abs(sizes[0] - sizes[1]) < 0.3 * sum(sizes)


@pytest.mark.parametrize("task", ["reconstruct", "continuation"])
def test_targets_are_the_text_s_tokens_and_only_a_repeated_text_ends(recipe, documents, tokenizer, task):
    make = passages.reconstructions if task == "reconstruct" else passages.continuations
    encoded = passages.encode(make(documents, LENGTH, tokenizer.starts), layout=recipe.layout, task=task)
    batch = encoded.collate(range(len(encoded)))
    for name, reader in recipe.tokenizers.items():
        fields = batch["readers"][name]
        assert fields["task"] == Task(task)
        assert fields["after"]["ids"].shape == fields["after"]["mask"].shape == (len(encoded), 0)
        for i, example in enumerate(encoded.examples):
            targets = fields["targets"][i][fields["weights"][i] > 0].tolist()
            if task == "reconstruct":
                assert targets == [*reader.encode(example.context), reader.eos]
            else:
                assert targets == reader.encode(example.answers[0]) and reader.eos not in targets
            before = fields["before"]["ids"][i][fields["before"]["mask"][i]].tolist()
            assert before == [*reader.begin, *reader.encode("Context:\n")]
    for i, example in enumerate(encoded.examples):
        ids = batch["source"]["ids"][i][batch["source"]["mask"][i]]
        assert bytes(ids.astype(np.uint8)).decode() == example.context


def test_text_longer_than_the_encoder_reads_is_refused_by_name_or_dropped(recipe, documents, tokenizer):
    found = passages.reconstructions(documents, 500, tokenizer.starts)

    def encode(overlong):
        data = dataclasses.replace(recipe.layout.data, overlong=overlong)
        layout = dataclasses.replace(recipe.layout, window=300, data=data)
        return passages.encode(found, layout=layout, task="reconstruct")

    with pytest.raises(UserError, match=r"'passage 1': .*config\.encoder\.window=300"):
        encode("refuse")
    for overlong in ("drop", "cut"):  # what the encoder did not read cannot be repeated
        kept = encode(overlong)
        assert [example.id for example in kept.examples] == ["passage 0"]
        assert (kept.counts["context"], kept.counts["source_cut"]) == (2, 0)
    with pytest.raises(UserError, match=r"continuation.*data\.passages"):
        found = passages.continuations(["a"], LENGTH, tokenizer.starts)
        passages.encode(found, layout=recipe.layout, task="continuation")


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.ndjson", "p.json", "p.txt"])
def test_texts_are_read_from_every_kind_of_file(tmp_path, name):
    texts = ["First one.\nIts second line.", "Zweiter – Übung."]
    rows = [json.dumps({"text": text}) for text in texts]
    written = {".json": f"[{','.join(rows)}]", ".txt": "\n" + "\n \t\n".join(texts)}
    raw = (written.get(name[1:], "\n".join(rows)) + "\r\n\r\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert passages.read(str(tmp_path / name)) == texts
    (tmp_path / "more.txt").write_text("Third.", "utf-8")
    assert passages.read(f"{tmp_path / name},{tmp_path / 'more.txt'}") == [*texts, "Third."]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("p.jsonl", '{"text": "a"}\n\n{"words": "b"}', r"p\.jsonl:3: .*text.*'words'"),
        ("p.jsonl", '{"text": "a"}\n{"text": "  "}', r"p\.jsonl:2: "),
        ("p.json", '[{"text": "a"}, "b"]', r"p\.json: \[1\]='b'"),
        ("p.txt", " \n\n \n", r"p\.txt: no text"),
        ("p.csv", "id,text\n1,a", r"p\.csv: a CSV file"),
    ],
)
def test_broken_row_and_empty_file_are_refused_with_their_place(tmp_path, name, content, named):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=named):
        passages.read(str(tmp_path / name))


def test_long_rows_and_a_byte_order_mark_are_read(tmp_path):
    text = " ".join(str(i) for i in range(40_000))
    row = json.dumps({"text": text}).encode()
    for name, content in {"a.jsonl": row + b"\n" + row, "b.json": b"[\n" + row + b"]"}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert set(passages.read(str(tmp_path / name))) == {text}
