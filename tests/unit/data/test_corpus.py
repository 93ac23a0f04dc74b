"""lw_jax/data/corpus.py: text packed once, found again, whole after a stop; its windows, with a rate that warms up."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import time

import numpy as np
import pytest
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash
from lw_jax.data import corpus, documents
from lw_jax.data.corpus import Span, WarmupSchedule, Windows, pack
from lw_jax.data.row_sources import Unreachable
from lw_jax.data.tokens import ByteTokenizer, load_tokenizer
from lw_jax.recipes import selfmade
from tests import two_jobs

DOCUMENTS = ["naïve 中文\n", "", "two words", " \n ", *(f"document {i} of many" for i in range(31))]
KEPT = [text for text in DOCUMENTS if text.strip()]
EOS = ByteTokenizer().eos


@dataclasses.dataclass(frozen=True)
class Wide(ByteTokenizer):
    """Code points one for one: a vocabulary that needs 32 bits."""

    vocab: int = 0x110001
    eos: int = 0x110000
    fingerprint: str = "code points"

    def encode_batch(self, texts):
        return [np.array([ord(char) for char in text], np.int32) for text in texts]


class Stopping(ByteTokenizer):
    """Goes on for some batches, and then the job is killed."""

    left = 2

    def encode_batch(self, texts):
        if not Stopping.left:
            raise KeyboardInterrupt
        Stopping.left -= 1
        return super().encode_batch(texts)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return str(path)


@pytest.fixture
def tiny(monkeypatch):
    """Many small batches."""
    monkeypatch.setattr(corpus, "BATCH", 37)


def expected(texts=KEPT):
    return np.concatenate([[*text.encode(), EOS] for text in texts])


def everything(packed):
    return packed.rows([0], packed.tokens)[0]


def test_every_document_is_followed_by_eos_and_blank_ones_are_counted_apart(tmp_path, source, tiny):
    packed, ids = pack(source, ByteTokenizer(), root=tmp_path), expected()
    assert everything(packed).dtype == np.int32
    np.testing.assert_array_equal(everything(packed), ids)
    np.testing.assert_array_equal(packed.rows([7, 300, 52], 19), [ids[7:26], ids[300:319], ids[52:71]])
    assert (packed.documents, packed.blank) == (len(KEPT), 2)
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(source, tmp_path / "moved")
    assert (pack(str(moved), ByteTokenizer(), root=tmp_path).source) == str(moved), "the place that was asked for"
    train, _ = packed.split(0.2, length=7)
    assert "2 documents without text left out" in Windows(train, 7, "model").describe()[0]
    assert packed.bytes == sum(len(text.encode()) for text in KEPT) == packed.tokens - len(KEPT)
    with pytest.raises(IndexError):
        packed.rows([packed.tokens - 9], 10)


def test_text_in_pieces_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 11)
    text = "a line\n" * 23 + "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n"  # the last pieces are blank, and belong to it
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("another")
    packed = pack(str(tmp_path), ByteTokenizer(), root=tmp_path)
    np.testing.assert_array_equal(everything(packed), expected([text, "another"]))
    assert packed.documents == 2 and packed.blank == 0


@pytest.fixture(params=["prepend", "metaspace", "breaks in one"])
def blanks(request, tmp_path, sentencepiece):
    """A tokenizer that puts a blank before a text; the last of them has two line breaks as one token."""
    backend = sentencepiece.backend.backend_tokenizer
    if request.param == "metaspace":
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
    elif request.param == "breaks in one":
        vocab = sentencepiece.backend.get_vocab()
        backend.model = models.BPE(vocab | {"\n\n": len(vocab)}, [("\u2581", "a"), ("\n", "\n")])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>").save_pretrained(tmp_path / "blanks")
    tokenizer = load_tokenizer(tmp_path / "blanks")
    assert tokenizer.adds_blank
    return tokenizer


@pytest.mark.parametrize("size", [7, 11, 64])
def test_a_tokenizer_that_puts_a_blank_before_a_text_puts_none_before_its_pieces(tmp_path, monkeypatch, blanks, size):
    monkeypatch.setattr(corpus, "BATCH", 3 * size)  # a batch may begin inside a document
    (tmp_path / "texts").mkdir()
    texts = ["a line\na bc\n\n\nword  of a\n a" + "abc" * 9 + "\n", "another\n\n<e>\n"]
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    source = str(tmp_path / "texts")
    whole = everything(pack(source, blanks, root=tmp_path / "whole"))
    monkeypatch.setattr(documents, "PIECE", size)
    ids = everything(pack(source, blanks, root=tmp_path))
    parts = np.split(ids, np.flatnonzero(ids == blanks.eos) + 1)
    assert [blanks.decode(part) for part in parts] == [texts[0], "another\n\n", ""]
    if size == 64:
        np.testing.assert_array_equal(ids, whole)


def test_only_corpora_of_tokenizers_that_put_a_blank_before_a_text_are_packed_anew(tmp_path, source, blanks):
    plain = pack(source, ByteTokenizer(), root=tmp_path)
    key = [3, documents.identify(source), ByteTokenizer().fingerprint, EOS, ()]
    assert plain.folder.name == content_hash(key, size=8)
    key = [3, documents.identify(source), blanks.fingerprint, blanks.eos, blanks.begin]
    assert pack(source, blanks, root=tmp_path).folder.name != content_hash(key, size=8)


@pytest.mark.parametrize(("vocab", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_are_kept_in_as_many_bits_as_the_vocabulary_needs(tmp_path, source, tiny, vocab, dtype):
    packed = pack(source, Wide(vocab=vocab, eos=vocab - 1), root=tmp_path)
    assert packed.dtype == dtype
    np.testing.assert_array_equal(everything(packed), np.concatenate([[*map(ord, text), vocab - 1] for text in KEPT]))


def test_tokenizer_and_content_each_have_a_corpus_of_their_own(tmp_path, source):
    other = ByteTokenizer(fingerprint="another")
    folders = {pack(source, tokenizer, root=tmp_path).folder for tokenizer in (ByteTokenizer(), Wide(), other)}
    with open(source, "a") as file:
        file.write('{"text": "more"}\n')
    longer = pack(source, ByteTokenizer(), root=tmp_path)
    assert len(folders | {longer.folder}) == 4
    np.testing.assert_array_equal(everything(longer), expected([*KEPT, "more"]))


@pytest.mark.parametrize("text", ["b", "b</a>", "<a>b", "<a>b</a>\n\n", "<a>b</a> <a>c</a>"])
def test_document_s_own_marks_are_not_doubled(tmp_path, text):
    selfmade.write_tokenizer(tmp_path / "letters", selfmade.Vocabulary(0, "<a>", "</a>", "<pad>"), [])
    tokenizer = load_tokenizer(tmp_path / "letters")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "z"}))
    packed = pack(str(tmp_path / "rows.jsonl"), tokenizer, root=tmp_path)
    bare = text.rstrip() if "</a>" in text else text
    bare = bare.removeprefix("<a>").removesuffix("</a>")
    assert everything(packed).tolist() == tokenizer.encode(f"<a>{bare}</a><a>z</a>")


# --- interruption


def test_killed_job_leaves_nothing_that_counts(tmp_path, source, tiny):
    whole = pack(source, ByteTokenizer(), root=tmp_path / "other")
    Stopping.left = 4
    with pytest.raises(KeyboardInterrupt):
        pack(source, Stopping(), root=tmp_path)
    left = sorted((tmp_path / "corpus").glob("*/*"))
    assert any(file.suffix == ".bin" for file in left) and not any(file.name == "meta.json" for file in left)
    Stopping.left = 1000
    packed = pack(source, Stopping(), root=tmp_path)
    assert packed.folder.name == whole.folder.name
    np.testing.assert_array_equal(everything(packed), everything(whole))


def test_killed_packer_of_a_node_whose_lock_did_not_meet_leaves_the_other_s_corpus(tmp_path, source, tiny, monkeypatch):
    def on(node):
        monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", node, "", "", "")))

    read, found = documents.read, []

    def late(*arguments):
        monkeypatch.setattr(documents, "read", read)
        on("two")
        found.append(pack(source, ByteTokenizer(), root=tmp_path))
        on("one")
        return read(*arguments)

    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(documents, "read", late)
    Stopping.left = 2
    with pytest.raises(KeyboardInterrupt):
        pack(source, Stopping(), root=tmp_path)
    for one in (*found, pack(source, ByteTokenizer(), root=tmp_path)):
        np.testing.assert_array_equal(everything(one), expected())


def test_what_a_packer_left_long_ago_is_removed(tmp_path, source, tiny):
    folder = pack(source, ByteTokenizer(), root=tmp_path).folder
    for name, seconds in (("ids-gone.bin", 2 * corpus.STALE), ("ids-works.bin", 0)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - seconds,) * 2)
    (folder / corpus.META).unlink()
    packed = pack(source, ByteTokenizer(), root=tmp_path)
    assert {file.name for file in folder.glob("*.bin")} == {packed.ids, "ids-works.bin"}


def test_of_two_jobs_one_packs_and_the_other_finds_it(tmp_path, source):
    calls = []

    def job(hold):
        class Slow(ByteTokenizer):
            def encode_batch(self, texts):
                calls.append(len(texts))
                hold()
                return super().encode_batch(texts)

        return pack(source, Slow(), root=tmp_path)

    found = two_jobs.run(job)
    assert len(found) == 2 and len(calls) == 1
    for one in found:
        np.testing.assert_array_equal(everything(one), expected())


@pytest.mark.parametrize(("name", "content"), [("ids*.bin", b"short"), ("ids*.bin", None), ("meta.json", b"{")])
def test_damaged_corpus_is_refused_by_name(tmp_path, source, tiny, name, content):
    (file,) = pack(source, ByteTokenizer(), root=tmp_path).folder.glob(name)
    file.write_bytes(content) if content is not None else file.unlink()
    with pytest.raises(UserError, match=f"{re.escape(file.name)}: .*remove the folder"):
        pack(source, ByteTokenizer(), root=tmp_path)


def test_text_or_folder_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    with pytest.raises(UserError, match=r"a\.jsonl: no text in its 2 documents"):
        pack(str(tmp_path / "a.jsonl"), ByteTokenizer(), root=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="another cache folder"):
        pack(str(tmp_path / "a.jsonl"), ByteTokenizer(), root=tmp_path / "file")


def test_hub_that_does_not_answer_gives_what_was_packed_and_says_so(tmp_path, monkeypatch, caplog):
    def silent(source, split, columns):
        raise Unreachable(f"{source}: no route")

    revision = ["old"]
    monkeypatch.setattr(documents, "identify", lambda source, *_: [source, revision[0]])
    monkeypatch.setattr(documents, "read", lambda source, *_: iter([documents.Piece(f"{source} {revision[0]}", True)]))
    pack("hub:org/t", ByteTokenizer(), root=tmp_path)
    revision[0] = "new"
    made = pack("hub:org/t", ByteTokenizer(), root=tmp_path)
    os_time = (made.folder / "meta.json").stat().st_mtime + 5
    corpus.os.utime(made.folder / "meta.json", (os_time, os_time))
    monkeypatch.setattr(documents, "identify", silent)
    found = pack("hub:org/t", ByteTokenizer(), root=tmp_path)
    assert found.folder == made.folder
    assert f"no route. Taken as it was packed in {made.folder}" in caplog.text
    for source, tokenizer in (("hub:org/u", ByteTokenizer()), ("hub:org/t", Wide())):
        with pytest.raises(Unreachable, match="no route"):
            pack(source, tokenizer, root=tmp_path)


# --- held out


@pytest.mark.parametrize(("held_out", "length"), [(0.2, 7), (0.37, 16), (0.5, 100)])
def test_split_shares_one_token_that_is_a_target_of_the_first_side_alone(tmp_path, source, held_out, length):
    packed = pack(source, ByteTokenizer(), root=tmp_path)
    first, last = packed.split(held_out, length=length)
    assert (first.start, last.stop) == (0, packed.tokens)
    assert first.stop - 1 == last.start and last.start % length == 0
    assert 0 <= len(last) - 1 - held_out * (packed.tokens - 1) < length
    (head,), (tail,) = packed.rows([0], len(first)), packed.rows([last.start], len(last))
    np.testing.assert_array_equal(np.concatenate([head, tail[1:]]), everything(packed))


def test_split_that_leaves_a_side_without_a_window_is_refused(tmp_path, source):
    packed = pack(source, ByteTokenizer(), root=tmp_path)
    for held_out, length in ((0.0, 7), (1.0, 7), (0.99, 50), (0.5, packed.tokens)):
        with pytest.raises(UserError, match=f"held_out={held_out} .*window of {length}"):
            packed.split(held_out, length=length)


# --- windows


LENGTH = 7


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


def test_rate_rises_evenly_to_one_and_stays(windows):
    data_schedule = WarmupSchedule.of(windows, warmup=10, start=0.2)
    rates = [
        data_schedule.batch(n, global_batch=6, seed=0, share=slice(0, 4))["readers"]["lm"]["rate"] for n in range(13)
    ]
    assert all(rate.dtype == np.float32 and rate.shape == (4,) for rate in rates)
    np.testing.assert_array_equal(
        rates, np.repeat(np.minimum(0.2 + 0.08 * np.arange(13), 1).astype(np.float32)[:, None], 4, axis=1)
    )
