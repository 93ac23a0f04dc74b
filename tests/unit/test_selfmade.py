"""Self-made readers: two tokenizers, folders that their sizes name, and a refusal before they are made."""

import dataclasses

import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import cards
from lw_jax.data.tokens import load_tokenizer
from lw_jax.recipes import selfmade
from tests import tiny

TEXT = "Zoë's lantern costs 1,024 crowns — or so.\nQuestion: why?"


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return tiny.make_config(tmp_path_factory.getbasetemp() / "readers")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    texts = [example.context for example in cards.make(256, facts=3, seed=0, split="train")]
    found = {}
    for name, family in selfmade.FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        selfmade.write_tokenizer(folder, family, texts)
        found[name] = load_tokenizer(folder)
    return found


@pytest.mark.parametrize("family", selfmade.FAMILIES)
def test_any_text_survives_the_tokenizer(tokenizers, family):
    one = tokenizers[family]
    ids = one.encode(TEXT)
    assert one.decode(ids) == TEXT
    assert max(ids) < one.vocab <= selfmade.FAMILIES[family].vocab


def test_families_differ_in_vocabulary_ids_and_opening(tokenizers):
    llama, qwen = tokenizers["llama"], tokenizers["qwen2"]
    assert llama.vocab != qwen.vocab and llama.encode(TEXT) != qwen.encode(TEXT)
    assert llama.decode(llama.begin) == "" and len(llama.begin) == 1 and qwen.begin == ()
    for one, family in ((llama, "llama"), (qwen, "qwen2")):
        ids = one.backend.convert_tokens_to_ids([selfmade.FAMILIES[family].end, selfmade.FAMILIES[family].pad])
        assert [one.eos, one.pad] == ids and one.eos != one.pad and one.eos in one.stops


def test_folder_is_named_by_what_the_reader_is_made_of(cfg):
    named = {selfmade.folder(cfg, "selfmade:llama"), selfmade.folder(cfg, "selfmade:qwen")}
    for changes in (
        {"selfmade": dataclasses.replace(cfg.selfmade, width=132)},
        {"selfmade": dataclasses.replace(cfg.selfmade, steps=7)},
        {"prompt": dataclasses.replace(cfg.prompt, anchor="\nReply:")},
        {"data": dataclasses.replace(cfg.data, facts=3)},
    ):
        named.add(selfmade.folder(dataclasses.replace(cfg, **changes), "selfmade:llama"))
    assert len(named) == 6
    wire_only = dataclasses.replace(cfg, encoder=dataclasses.replace(cfg.encoder, slots=3))
    assert selfmade.folder(wire_only, "selfmade:llama") == selfmade.folder(cfg, "selfmade:llama")


def test_reader_that_is_not_made_yet_is_refused_with_its_folder(cfg):
    path = selfmade.folder(cfg, "selfmade:llama")
    with pytest.raises(UserError, match=f"source 'selfmade:llama': no finished reader in {path}"):
        selfmade.finished_folder(cfg, "selfmade:llama")


def test_finished_reader_is_found_by_the_file_written_last(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    path = selfmade.folder(cfg, "selfmade:qwen")
    path.mkdir(parents=True)
    with pytest.raises(UserError):
        selfmade.finished_folder(cfg, "selfmade:qwen")
    (path / "config.json").touch()
    assert selfmade.finished_folder(cfg, "selfmade:qwen") == path
    assert path.is_relative_to(tmp_path)


def test_unknown_family_is_refused():
    with pytest.raises(UserError, match="source 'selfmade:gemma': self-made readers are"):
        selfmade.family("selfmade:gemma")
