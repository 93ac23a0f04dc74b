"""lw_jax/data/preferences.py: where a prompt ends, how a reply ends in every family, what is cut, and the batches."""

import dataclasses
import itertools

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lw_jax.core.config_sections import DPO
from lw_jax.core.errors import UserError
from lw_jax.data.pairs import Preference
from lw_jax.data.preferences import encode, part
from lw_jax.data.tokens import load_tokenizer

WIDE = DPO(max_length=1000)
LOOP = "{% for m in messages %}"
LLAMA_HEAD = "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
LLAMA_REPLY = "<|start_header_id|>assistant<|end_header_id|>\n\n"
ZEPHYR = LOOP + "<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"


def ask(reply):
    return "{% if add_generation_prompt %}" + reply + "{% endif %}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One family's special tokens, its template, what a short prompt becomes in it, and what ends a turn."""

    specials: tuple[str, ...]  # the first one pads
    begin: str
    eos: str
    template: str
    prompt: str
    end: str


FAMILIES = {
    "llama3": Kind(
        ("<pad>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "{{ bos_token }}" + LOOP + LLAMA_HEAD + ask(LLAMA_REPLY),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi he<|eot_id|>" + LLAMA_REPLY,
        "<|eot_id|>",
    ),
    "phi3": Kind(
        ("<pad>", "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "",
        "<|endoftext|>",
        LOOP
        + "<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
        + "{% else %}{{ eos_token }}{% endif %}",
        "<|user|>\nhi he<|end|>\n<|assistant|>\n",
        "<|end|>",
    ),
    "qwen": Kind(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "",
        "<|im_end|>",
        LOOP
        + "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        + ask("<|im_start|>assistant\n"),
        "<|im_start|>user\nhi he<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "tinyllama": Kind(
        ("<unk>", "<s>", "</s>"),
        "<s>",
        "</s>",
        ZEPHYR + ask("<|assistant|>\n"),
        "<|user|>\nhi he</s>\n<|assistant|>\n",  # no BOS: the template writes none
        "</s>",
    ),
}
MERGES = [("Ċ", "Ċ"), ("h", "e"), ("he", "y"), ("Ġ", "y"), ("h", "i")]


def backend_of(family):
    """Byte-level BPE, but for TinyLlama one that writes word beginnings as SentencePiece does."""
    specials = FAMILIES[family].specials
    if family != "tinyllama":
        tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
        backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    else:
        merges = [("▁", "h"), *MERGES[1:3]]
        tokens = [*specials, "▁", "\n", *map(chr, range(33, 127)), *(a + b for a, b in merges)]
        backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return backend


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("tokenizers"), {}

    def load(family, template=None):
        key = family, template
        if key not in made:
            kind, backend = FAMILIES[family], backend_of(family)
            if kind.begin:
                mark = (kind.begin, backend.token_to_id(kind.begin))
                backend.post_processor = processors.TemplateProcessing(single=[kind.begin, "$A"], special_tokens=[mark])
            named = {"eos_token": kind.eos, "pad_token": kind.specials[0]}
            if bos := kind.begin or ("<s>" if "<s>" in kind.specials else ""):
                named["bos_token"] = bos
            fast = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
            fast.chat_template = kind.template if template is None else template or None
            folder = root / f"{family}{len(made)}"
            fast.save_pretrained(str(folder))
            made[key] = load_tokenizer(folder)
        return made[key]

    return load


@pytest.fixture
def qwen(load):
    return load("qwen")


def turn(role, content):
    return {"role": role, "content": content}


def talk(prompt="hi he", chosen="hey you", rejected="no"):
    return Preference("f:1", (turn("user", prompt),), (turn("assistant", chosen),), (turn("assistant", rejected),))


def encode_one(tokenizer, pair, template="chat", limits=WIDE):
    data = encode([pair], tokenizer=tokenizer, template=template, limits=limits)
    return data.pairs[0]


def whole(pair):
    return [np.concatenate([pair.prompt, reply]).tolist() for reply in (pair.chosen, pair.rejected)]


def special(tokenizer, text):
    return tokenizer.backend.convert_tokens_to_ids(text)


# --- how a conversation is written and where its replies end ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["turns", "strings"])
def test_chat_writes_the_talk_in_the_format_of_the_family(load, family, form):
    tokenizer, kind = load(family), FAMILIES[family]
    pair = encode_one(tokenizer, talk() if form == "turns" else Preference("f:1", "hi he", "hey you", "no"))
    assert pair.prompt.tolist() == tokenizer.encode(kind.prompt)
    assert whole(pair)[0] == tokenizer.encode(kind.prompt + "hey you" + kind.end)
    assert whole(pair)[1] == tokenizer.encode(kind.prompt + "no" + kind.end)
    assert pair.chosen.dtype == pair.rejected.dtype == pair.prompt.dtype == np.int32


def test_a_turn_that_a_template_opens_unasked_behind_a_reply_is_not_trained(load):
    asked = FAMILIES["llama3"].template
    opens = load("llama3", asked.replace(ask(LLAMA_REPLY), LLAMA_REPLY))
    assert whole(encode_one(opens, talk())) == whole(encode_one(load("llama3"), talk()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tail", ["{0}{0}", "{0}\n{eos} \n"])
def test_double_eos_where_a_conversation_already_holds_an_end(load, family, tail):
    tokenizer, kind = load(family), FAMILIES[family]
    tail = tail.format(kind.end, eos=kind.eos)
    assert whole(encode_one(tokenizer, talk(chosen="hey you" + tail))) == whole(encode_one(tokenizer, talk()))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_ends_with_one_terminator_and_keeps_its_white_space(load, family):
    tokenizer, eos, end = load(family), FAMILIES[family].eos, FAMILIES[family].end
    for reply, written in (
        (" hey \n", f" hey \n{eos}"),
        (f"hey{eos}", f"hey{eos}"),
        (f"hey{eos} {eos}\n", f"hey{eos}"),
        (f"hey{end}", f"hey{end}"),
    ):
        pair = encode_one(tokenizer, Preference("f:1", "hi", reply, "no"), "plain")
        assert whole(pair)[0] == [*tokenizer.begin, *tokenizer.encode(f"hi{written}")]
        assert whole(pair)[1] == [*tokenizer.begin, *tokenizer.encode(f"hino{eos}")]


def test_missing_eos_where_a_template_writes_no_terminator(load):
    tokenizer = load("qwen", LOOP + "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}" + ask("assistant: "))
    pair = encode_one(tokenizer, talk())
    assert whole(pair)[0] == [*tokenizer.encode("user: hi he\nassistant: hey you"), tokenizer.eos]


# --- BOS ---


@pytest.mark.parametrize("family", ["llama3", "phi3", "tinyllama"])
@pytest.mark.parametrize("template", ["plain", "chat"])
def test_bos_before_response_in_the_data_is_taken_away(load, family, template):
    tokenizer = load(family)
    bos = FAMILIES[family].begin or "<s>"
    marked, clean = (Preference("f:1", "hi he", before + "hey", before + "no") for before in (bos, ""))
    assert whole(encode_one(tokenizer, marked, template)) == whole(encode_one(tokenizer, clean, template))


def test_bos_in_a_plain_prompt_is_not_doubled(load):
    marked, clean = (Preference("f:1", begin + "hi", "hey", "no") for begin in ("<|begin_of_text|>", ""))
    assert whole(encode_one(load("llama3"), marked, "plain")) == whole(encode_one(load("llama3"), clean, "plain"))


def test_a_cut_prompt_that_has_no_bos_keeps_nothing_of_its_start(load):
    whole, cut = (
        encode_one(load("tinyllama"), talk(), limits=DPO(max_length=1000, max_prompt=size, truncation="keep_end"))
        for size in (0, 7)
    )
    assert cut.prompt.tolist() == whole.prompt[-7:].tolist()


# --- the boundary between prompt and reply ---


def test_prompt_that_grows_together_with_a_reply_ends_before_and_is_counted(qwen):
    plain = [Preference(f"f:{i}", prompt, reply, "no") for i, (prompt, reply) in enumerate(
        [("hi\n", "\nhey"), ("hi\n", "hey"), ("\n", "\nhey")])]  # fmt: skip
    data = encode(plain, tokenizer=qwen, template="plain", limits=WIDE)
    merged, clean = data.pairs
    assert merged.prompt.tolist() == qwen.encode("hi") and clean.prompt.tolist() == qwen.encode("hi\n")
    assert whole(merged) == [[*qwen.encode(text), qwen.eos] for text in ("hi\n\nhey", "hi\nno")]
    assert (data.counts["boundary"], data.counts["nothing"]) == (1, 1), "of the last one nothing is left"


TRANSCRIPT = Preference("f:1", "\n\nHuman: a\n\nAssistant:", " b", " c")


@pytest.mark.parametrize(
    ("written", "pair", "form", "named"),
    [
        ("{{ messages | length }} turns\n" + FAMILIES["qwen"].template, talk(), "chat", "'chosen'"),
        ("{{ raise_exception('no such role') }}", talk(), "chat", "no such role"),
        ("", talk(), "chat", "chat template"),
        (None, talk(), "plain", 'template="chat"'),
        (None, TRANSCRIPT, "chat", ""),
    ],
)
def test_row_that_the_template_cannot_write_is_refused_by_its_name(load, written, pair, form, named):
    with pytest.raises(UserError, match=f"f:1: .*{named}"):
        encode_one(load("qwen", written), pair, form)


# --- what is cut and dropped; a letter is a token, and each reply has an EOS more ---


def row(prompt, chosen, rejected, name="p"):
    letters = itertools.cycle("abcdefg")
    texts = ("".join(itertools.islice(letters, size)) for size in (prompt, chosen, rejected))
    return Preference(name, *texts)


def fit(tokenizer, *sizes, **limits):
    """Returns the data set of rows of these sizes besides one that always fits and comes last."""
    rows = [row(*size, name=f"row {i}") for i, size in enumerate(sizes)]
    return encode([*rows, row(1, 1, 0, "always")], tokenizer=tokenizer, template="plain", limits=DPO(**limits))


@pytest.mark.parametrize(
    ("family", "truncation", "max_prompt", "sizes", "left", "counts"),
    [
        ("qwen", "drop", 0, [(5, 7, 3), (5, 2, 8), (6, 7, 7)], [(5, 8, 4)], {"length": 2}),
        ("llama3", "drop", 0, [(4, 7, 3), (4, 2, 8), (6, 7, 7)], [(5, 8, 4)], {"length": 2}),
        ("llama3", "drop", 7, [(6, 3, 2), (7, 3, 2), (40, 3, 2)], [(7, 4, 3)], {"max_prompt": 2}),
        ("llama3", "keep_start", 0, [(4, 7, 3), (4, 11, 3), (4, 9, 10)], [(5, 8, 4), (5, 8, 4), (5, 8, 8)],
         {"reply_cut": 2}),
        ("llama3", "keep_start", 7, [(6, 3, 2), (7, 3, 2), (40, 3, 2)], [(7, 4, 3)] * 3, {"prompt_cut": 2}),
        ("llama3", "keep_end", 0, [(9, 3, 6), (9, 3, 2), (9, 11, 3), (9, 12, 3)], [(6, 4, 7), (9, 4, 3)],
         {"prompt_cut": 2, "length": 2}),
        ("llama3", "keep_end", 7, [(6, 3, 2), (40, 3, 2)], [(7, 4, 3)] * 2, {"prompt_cut": 1}),
        ("llama3", "keep_end", 2, [(6, 3, 2)], [(2, 4, 3)], {"prompt_cut": 1}),
        ("qwen", "keep_end", 0, [(5, 11, 3), (5, 12, 3)], [(1, 12, 4)], {"prompt_cut": 1, "length": 1}),
        *(("qwen", mode, 0, [(13, 1, 2), (40, 1, 2), (11, 1, 0)], [(11, 2, 1)], {"prompt": 2})
          for mode in ("drop", "keep_start", "keep_end")),
    ],
)  # fmt: skip
def test_rows_are_cut_as_they_are_to_be_or_dropped_and_counted(
    load, family, truncation, max_prompt, sizes, left, counts
):
    tokenizer = load(family)
    data = fit(tokenizer, *sizes, max_length=13, max_prompt=max_prompt, truncation=truncation)
    found = data.pairs[:-1]
    assert [(len(pair.prompt), len(pair.chosen), len(pair.rejected)) for pair in found] == left
    told = {key: count for key, count in data.counts.items() if count and key not in ("given", "kept")}
    assert told == counts and data.counts["given"] == len(sizes) + 1
    uncut = encode(data.examples, tokenizer=tokenizer, template="plain", limits=WIDE).pairs
    head = len(tokenizer.begin)
    for pair, full in zip(found, uncut, strict=False):
        prompt, size = full.prompt.tolist(), len(pair.prompt)
        start = prompt[:size] if truncation == "keep_start" else [*prompt[:head], *prompt[len(prompt) - size + head :]]
        assert pair.prompt.tolist() == start[:size]
        for reply, whole_reply in ((pair.chosen, full.chosen), (pair.rejected, full.rejected)):
            assert reply.tolist() == whole_reply.tolist()[: len(reply)]
            assert len(reply) == len(whole_reply) or truncation == "keep_start"


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_a_prompt_of_which_bos_alone_would_be_left_is_dropped(load, truncation):
    with pytest.raises(UserError, match="max_prompt"):
        fit(load("llama3"), (6, 3, 2), max_length=13, max_prompt=1, truncation=truncation)


def test_pair_whose_replies_become_equal_by_the_cut_is_dropped(qwen):
    rows = [Preference("a", "xxxxx", "abcdefgh", "abcdefgz"), Preference("b", "x", "he", "he<|im_end|>"), row(1, 2, 3)]
    data = encode(rows, tokenizer=qwen, template="plain", limits=DPO(max_length=10, truncation="keep_start"))
    assert data.counts["same"] == 2 and data.examples == (rows[2],)


@pytest.mark.parametrize("rows", [[], [row(20, 1, 2, "f:1"), row(3, 20, 2, "f:2"), row(3, 2, 20, "f:3")]])
def test_none_left_is_refused_with_a_row_of_each_reason(qwen, rows):
    with pytest.raises(UserError, match=f"none of {len(rows)} pairs") as caught:
        encode(rows, tokenizer=qwen, template="plain", limits=DPO(max_length=10))
    assert all(f"'{one.id}'" in str(caught.value) for one in rows[:2])


# --- batches ---


def test_batch_holds_both_sides_and_flags_at_the_tokens_themselves(load):
    tokenizer = load("llama3")
    rows = [row(4, 6, 2), row(2, 1, 8), row(3, 3, 1)]
    data = encode(rows, tokenizer=tokenizer, template="plain", limits=WIDE, name="tuned")
    batch = data.collate([2, 0], sizes=np.zeros((2, 4), np.int32))
    assert batch["source"] == {} and list(batch["readers"]) == ["tuned"] and batch["index"].tolist() == [2, 0]
    fields = batch["readers"]["tuned"]
    shapes = {key: (leaf.shape, leaf.dtype.name) for key, leaf in fields.items()}
    assert shapes == {
        "ids": ((2, 2, 16), "int32"),  # the longest row has 12
        "mask": ((2, 2, 16), "bool"),
        "completion": ((2, 2, 16), "bool"),
        "weights": ((2, 1), "float32"),
        "training": ((2,), "float32"),
    }
    assert not fields["training"].any(), "dropout needs its own flag"
    learned = dataclasses.replace(
        data, training=True, reference=lambda rows: {"reference": np.full((len(rows), 2), 5.0)}
    )
    told = learned.collate([2, 0])["readers"]["tuned"]
    assert (told["training"] == 1).all() and (told["reference"] == 5).all()
    assert (fields["weights"] == 1).all() and batch["index"].dtype == np.int32
    for place, index in enumerate((2, 0)):
        pair = data.pairs[index]
        for side, reply in enumerate((pair.chosen, pair.rejected)):
            ids, mask, completion = (fields[key][place, side] for key in ("ids", "mask", "completion"))
            assert ids[mask].tolist() == [*pair.prompt, *reply] and ids[completion].tolist() == reply.tolist()
            assert (ids[~mask] == tokenizer.pad).all() and not (completion & ~mask).any()
            assert mask[: mask.sum()].all() and completion[len(pair.prompt)] and not completion[len(pair.prompt) - 1]


def test_buckets_part_by_length_and_pad_less(qwen):
    rows = [row(2 + i % 7, 1 + 5 * i % 97, 1 + 3 * i % 61, f"r{i}") for i in range(41)]
    one = encode(rows, tokenizer=qwen, template="plain", limits=WIDE)
    many = part(one, 3)
    assert [len(data) for data in many] == [14, 14, 13]
    assert sorted(e.id for data in many for e in data.examples) == sorted(e.id for e in one.examples)
    lengths = [[pair.length for pair in data.pairs] for data in many]
    assert max(lengths[0]) <= min(lengths[1]) and max(lengths[1]) <= min(lengths[2])
    assert [data.length for data in many] == [-(-max(each) // 8) * 8 for each in lengths]
    masks = [data.collate(range(len(data)))["readers"]["policy"]["mask"] for data in many]
    assert [data.padding for data in many] == pytest.approx([1 - mask.mean() for mask in masks])
    assert 1 - sum(map(np.sum, masks)) / sum(map(np.size, masks)) < one.padding
