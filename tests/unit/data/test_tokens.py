import functools
import json
import types

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lw_jax.core.errors import UserError
from lw_jax.data import passages, prompt_tokens
from lw_jax.data.tokens import ByteTokenizer, byte_backend, load_source_tokenizer, load_tokenizer, wrap
from lw_jax.inference.language_model import LM
from tests import tiny

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("1", "2"), ("12", "3"), ("Ġ", "h"), ("Ġh", "i"), ("Ã", "©"), ("h", "e")]
WHOLE = "whole"  # in the vocabulary, but no merge leads to it
TOKENS = [*ALPHABET, *("".join(pair) for pair in MERGES), WHOLE]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<tool>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if date_string %}{{ date_string }}{% endif %}"
)

FIELDS = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": [*TOKENS, *SPECIAL, USER_DEFINED],
    "token_type": [1] * len(TOKENS) + [3] * len(SPECIAL) + [4],
    "merges": [" ".join(pair) for pair in MERGES],
    "bos_token_id": len(TOKENS) + 1,
    "eos_token_id": len(TOKENS) + 2,
    "add_bos_token": False,
    "chat_template": TEMPLATE,
}


def write_gguf(path, **changes):
    return tiny.write_gguf_tokenizer(path, FIELDS | changes)


@pytest.fixture
def gguf(tmp_path):
    return load_tokenizer(write_gguf(tmp_path / "tiny.gguf"))


def pieces(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "digits", "words", "accent"),
    [
        ("smollm", list("12312"), list("whole"), "e\u0301"),
        ("qwen2", list("12312"), list("whole"), "\u00e9"),
        ("llama-bpe", ["123", "12"], ["whole"], "e\u0301"),
    ],
)
def test_each_kind_of_vocabulary_has_its_own_rules(tmp_path, pre, digits, words, accent):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", pre=pre))
    assert (pieces(tokenizer, "12312"), pieces(tokenizer, "whole")) == (digits, words)
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == accent


@pytest.mark.parametrize("text", ["he hi 1234", "naïve 中文\n\n  tabs\t.", "", " leading , and 's spaces "])
def test_decoding_gives_the_text_back_untidied(gguf, text):
    assert gguf.decode(gguf.encode(text)) == text


def test_special_tokens_in_the_text_are_parsed_and_skipped_in_decoding(gguf):
    ids = gguf.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == len(TOKENS) + 1 and ids[-1] == gguf.eos == gguf.pad == len(TOKENS) + 2
    assert gguf.decode(ids) == "hi"
    assert gguf.stops == (gguf.eos, len(TOKENS))  # <|im_end|>, then <|endoftext|>
    user = gguf.encode(f"a{USER_DEFINED}b")
    assert len(user) == 3 and gguf.decode(user) == f"a{USER_DEFINED}b"


@pytest.mark.parametrize(
    ("pre", "add_bos", "begin"),
    [("smollm", False, False), ("smollm", True, True), ("smollm", None, False), ("llama-bpe", None, True)],
)
def test_begin_is_what_the_tokenizer_itself_prepends(tmp_path, pre, add_bos, begin):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", pre=pre, add_bos_token=add_bos))
    assert tokenizer.begin == ((len(TOKENS) + 1,) if begin else ())
    assert tokenizer.encode("h") == [TOKENS.index("h")]


def test_chat_is_rendered_with_generation_prompt_and_a_fixed_date(gguf):
    assert gguf.render_chat("hi", system="be").startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi")
    assert gguf.render_chat("hi").endswith("<|im_start|>assistant\n26 Jul 2024")
    assert "system" not in gguf.render_chat("hi")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "tekken"}, "'tekken'"),
        ({"model": "llama"}, "'llama'"),
        ({"eos_token_id": None}, "EOS"),
        ({"chat_template": None}, r"a\.gguf.*chat template"),
        ({"chat_template": "{{ raise_exception('no system role') }}"}, "no system role"),
    ],
)
def test_what_a_file_lacks_or_refuses_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(UserError, match=named):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", **changes)).render_chat("hi", system="be")


def test_fingerprint_follows_the_content(tmp_path, gguf):
    again = load_tokenizer(write_gguf(tmp_path / "again.gguf"))
    other = load_tokenizer(write_gguf(tmp_path / "other.gguf", merges=FIELDS["merges"][:-1]))
    bos = load_tokenizer(write_gguf(tmp_path / "bos.gguf", add_bos_token=True))
    chat = load_tokenizer(write_gguf(tmp_path / "chat.gguf", chat_template=TEMPLATE + "."))
    assert again.fingerprint == gguf.fingerprint
    assert len({gguf.fingerprint, other.fingerprint, bos.fingerprint, chat.fingerprint}) == 4


@pytest.fixture
def folder(tmp_path):
    """A qwen2 folder whose tokenizer.json splits by digits, cuts at 3 tokens and prepends <s>."""
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(TOKENS))])
    backend.enable_truncation(3)
    backend.enable_padding(length=7)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path / "model"


def test_folder_gives_what_its_tokenizer_json_says(folder):
    tokenizer = load_tokenizer(folder)
    assert pieces(tokenizer, "123 hi he") == ["123", " hi", " h", "e"]  # "Ġh" "e", uncut, unpadded
    assert tokenizer.begin == (len(TOKENS),)
    assert tokenizer.stops == (tokenizer.eos,) == (len(TOKENS) + 1,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [len(TOKENS) + 1, 5]}))
    assert load_tokenizer(folder).stops == (len(TOKENS) + 1, 5)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


@pytest.fixture
def marked(tmp_path):
    """A BERT-class folder whose tokenizer.json cuts and pads to 7 tokens."""
    tiny.write_bert(tmp_path / "bert")
    return tmp_path / "bert"


def test_bert_text_stands_between_its_marks_uncut_and_unpadded(marked):
    tokenizer = load_source_tokenizer(marked)
    assert tokenizer.special == ((2,), (3,)) and tokenizer.pad == 0
    ids, empty = (ids.tolist() for ids in tokenizer.encode_batch(["Latents, carried!", ""]))
    assert ids[0] == 2 and ids[-1] == 3 and len(ids) == 2 + 16
    assert tokenizer.backend.decode(ids) == "latents, carried!"
    assert empty == [2, 3]
    first, last = (tokenizer.backend.id_to_token(i) for i in (2, 3))
    written = [f"{first} ab {last}", f"{first} ab", "ab"]
    whole, open_end, bare = (ids.tolist() for ids in tokenizer.encode_batch(written))
    assert whole == open_end == bare


def test_bert_tokenizer_without_padding_token_is_refused(marked):
    for name, key in (("tokenizer.json", "padding"), ("tokenizer_config.json", "pad_token")):
        fields = json.loads((marked / name).read_text())
        del fields[key]
        (marked / name).write_text(json.dumps(fields))
    with pytest.raises(UserError, match="no padding token.*pad_token"):
        load_source_tokenizer(marked)
    fields = json.loads((marked / "config.json").read_text())
    (marked / "config.json").write_text(json.dumps(fields | {"pad_token_id": 0}))
    assert load_source_tokenizer(marked).pad == 0


def test_decoder_body_reads_by_its_reader_tokenizer(folder, tmp_path):
    gguf = write_gguf(tmp_path / "tiny.gguf", add_bos_token=True)
    for location in (folder, gguf):
        body, reader = load_source_tokenizer(location), load_tokenizer(location)
        assert body.fingerprint == reader.fingerprint
        assert body.special == ((), ())
        assert body.encode("hi he") == reader.encode("hi he") == body.encode_batch(["hi he"])[0].tolist()


def test_bytes_round_trip_and_padding_is_dropped():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve 中")
    assert ids == list("naïve 中".encode()) and max(ids) < tokenizer.pad < tokenizer.vocab
    assert tokenizer.decode([*ids, tokenizer.pad, tokenizer.eos]) == "naïve 中"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", ""])] == [[97], []]


def test_the_tokenizer_file_of_bytes_has_their_ids_and_reads_what_surrounds_a_broken_character():
    tokenizer, file = ByteTokenizer(), wrap(byte_backend())
    text = "".join(map(chr, range(0x800))) + "\U0001f600"
    assert file.encode(text) == tokenizer.encode(text) and file.decode(file.encode(text)) == text
    for ids in ([*b"caf\xc3"], [*range(256)], [*b"a", tokenizer.eos, *b"b"]):
        assert file.decode(ids) == tokenizer.decode(ids)


def test_tokens_begin_at_the_blank_before_them_where_a_tokenizer_leaves_it_out_of_their_places():
    text, trimmed = "hi  the caf\u00e9 ", byte_backend()
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert wrap(trimmed).starts(text) == wrap(byte_backend()).starts(text)


def test_new_text_keeps_the_blank_before_its_first_word(sentencepiece, gguf):
    assert sentencepiece.adds_blank and not gguf.adds_blank
    for tokenizer in (sentencepiece, gguf):
        whole = tokenizer.encode("the cat a dog")
        lm = types.SimpleNamespace(tokenizer=tokenizer, _check_positions=lambda *_: None)
        lm._text_behind = functools.partial(LM._text_behind, lm)
        for prompt in ("the", "the cat", "the cat a"):
            new = whole[len(tokenizer.encode(prompt)) :]
            lm._continue_all = lambda *_, new=new: np.array([[*new, -1]])
            assert prompt + LM.generate(lm, [prompt])[0] == "the cat a dog"
    assert sentencepiece.decode(sentencepiece.encode("a dog")) == "a dog", "alone, as nothing stands before it"


def test_a_continuation_begins_as_behind_its_text(sentencepiece):
    for text in (" a dog", "dog", " dog"):
        (ids,) = passages.tokenize_answers([text], sentencepiece, "continuation")
        assert ids.tolist() == sentencepiece.encode("the" + text)[len(sentencepiece.encode("the")) :]


def test_a_question_behind_a_text_has_the_ids_of_both_together(sentencepiece, gguf):
    for tokenizer in (sentencepiece, gguf):
        for text in (" cat", " a dog", "s", "a", "\na"):
            (ids,) = prompt_tokens.tokenize(tokenizer, [text], behind=True)
            assert ids.tolist() == tokenizer.encode("the" + text)[len(tokenizer.encode("the")) :]


@pytest.mark.parametrize("before", ["", "the\n", "the ", "the", "<e>"])
def test_a_text_in_the_place_of_the_context_has_a_blank_before_it_where_the_prompt_has_it(sentencepiece, gguf, before):
    for tokenizer in (sentencepiece, gguf):
        for text in ("cat", "a dog", " a dog", "\na"):
            (ids,) = prompt_tokens.tokenize_contexts(tokenizer, prompt_tokens.Frame(before, "", "", "", 0), [text])
            parts = tokenizer.backend.convert_ids_to_tokens([*tokenizer.encode(before), *ids.tolist()])
            assert "".join(parts) == "".join(tokenizer.backend.convert_ids_to_tokens(tokenizer.encode(before + text)))


def test_generation_ends_where_transformers_does(tmp_path, sentencepiece):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 30, "eos_token_id": [0, 7]}))
    assert load_tokenizer(tmp_path).stops == (0, 7), "of config.json where there is no generation_config.json"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_tokenizer(tmp_path).stops == (0, 9)
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))  # as GPT-2's
    assert "eos_token" in named and load_tokenizer(tmp_path).stops == (9,)
