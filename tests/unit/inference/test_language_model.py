"""Language models as users open them: what is of TTT models alone; decoders stand in test_trained_wire.py."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lw_jax
from configs import base
from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import FP32
from lw_jax.data import question_cards
from lw_jax.data.tokens import load_tokenizer
from lw_jax.hub import weights
from lw_jax.inference import language_model
from lw_jax.models import ttt
from lw_jax.models.ttt import TTTConfig
from lw_jax.recipes import selfmade
from sharding import mesh as meshes
from tests import tiny

NEW = 11  # tokens: over the end of a chunk
TEXTS = ["Mara", "Mara Ellis lives in Lisbon.", "Tom Reed"]
VARIANTS = {
    "linear": {"inner": "linear"},
    "mlp mamba": {"inner": "mlp", "pre_conv": True, "share_qk": True, "gate": True},
}


def write(folder, **changes):
    """Writes a random model with a small tokenizer."""
    kind = dataclasses.replace(selfmade.FAMILIES["llama"], vocab=352)
    selfmade.write_tokenizer(
        folder, kind, [example.context for example in question_cards.make(64, facts=2, seed=0, split="train")]
    )
    cfg = TTTConfig(vocab=352, width=36, layers=2, heads=3, ffn=41, chunk=5, **changes)
    rng = np.random.default_rng(3)
    drawn = jax.jit(ttt.init, static_argnums=1)(jax.random.key(0), cfg)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32), drawn)
    weights.save_ttt(folder, params, cfg, tokenizer=load_tokenizer(folder).backend)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each variant, opened."""
    return {name: lw_jax.load_lm(write(tmp_path_factory.mktemp("model"), **VARIANTS[name])) for name in VARIANTS}


@pytest.fixture(scope="module")
def lm(models):
    return models["mlp mamba"]


@pytest.fixture(scope="module")
def folder(lm):
    return lm.location


@pytest.mark.parametrize(
    ("recipe", "told"), [("dpo", r"export --merged DIR.*load_lm\(DIR\)"), ("latentwire", "answer")]
)
def test_run_that_generate_does_not_take_is_told_what_does(recipe, told, tmp_path):
    with pytest.raises(UserError, match=told):
        language_model.load_trained(config.build(base.get_config(recipe)), tmp_path)


def test_folder_of_a_ttt_model_is_known_by_its_config(lm, folder):
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == lm.tokenizer.eos
    assert type(lm) is language_model.TTTLM and lm.location == folder
    assert lm.mode.precision == FP32
    narrow = lw_jax.load_lm(folder, weights="bf16")
    assert narrow.mode.precision == ("bfloat16", "float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow.params)} == {np.dtype(np.float32)}, "fast weights stay fp32"
    ids = np.asarray([[5, 9, 2, 7, 1, 33]])
    gap = float(jnp.abs(lm.logits(ids) - narrow.logits(ids)).max() / jnp.abs(lm.logits(ids)).max())
    assert 0 < gap < 0.2
    with pytest.raises(UserError, match="id 352"):
        lm.logits([[5, 352]])
    padded = lm.logits([[5, 352]], mask=[[True, False]])
    assert padded.shape == (1, 2, 352)
    np.testing.assert_array_equal(padded[:, :1], lm.logits([[5, 7]])[:, :1], "padding may be any id")


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_from_the_memory_is_the_argmax_of_reading_all_anew(models, variant):
    lm = models[variant]
    told = lm.generate(TEXTS, max_new_tokens=NEW)
    begun = [lm.tokenizer.backend.bos_token + text for text in TEXTS]
    assert lm.generate(begun, max_new_tokens=NEW) == told, "a text's own BOS is not doubled"
    rows = [[*lm.tokenizer.begin, *lm.tokenizer.encode(text)] for text in TEXTS]
    lengths = list(map(len, rows))
    assert len(set(lengths)) == len(rows) and max(lengths) > 2 * lm.config.chunk, "ragged, and over several chunks"
    ids = np.zeros((len(rows), max(lengths) + NEW), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    for i in range(NEW):
        found = np.asarray(lm.logits(ids))
        for row, length in enumerate(lengths):
            ids[row, length + i] = found[row, length + i - 1].argmax()
    for row, length in enumerate(lengths):
        new = ids[row, length : length + NEW].tolist()
        end = next((i for i, token in enumerate(new) if token in lm.tokenizer.stops), NEW)
        assert told[row] == lm.tokenizer.decode(new[:end]) != ""
    assert len(set(told)) == len(TEXTS)


def test_folder_without_a_tokenizer_gives_logits(folder, tmp_path, lm):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    ids = np.asarray([[5, 9, 2, 7, 1, 33]])
    bare = lw_jax.load_lm(tmp_path)
    np.testing.assert_array_equal(bare.logits(ids), lm.logits(ids))
    with pytest.raises(UserError, match="tokenizer.json"):
        bare.generate(["Mara"])
    with pytest.raises(UserError, match="weights='nf4'"):
        lw_jax.load_lm(folder, weights="nf4")


def test_a_mesh_without_a_data_axis_generates_on_the_whole_of_it(folder, monkeypatch):
    split = lw_jax.load_lm(folder, mesh=jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("model",)))
    monkeypatch.setattr(split, "_continue", lambda params, ids, *rest: ids)
    assert split.generate(TEXTS, max_new_tokens=NEW)[1].endswith(TEXTS[1])


def test_what_is_drawn_follows_the_seed_and_not_the_devices(lm, folder):
    """Two devices share three rows, the last filled up."""
    split = lw_jax.load_lm(folder, mesh=meshes.make(data=2, model=1, devices=jax.devices()[:2]))
    drawn = [
        one.generate(TEXTS, max_new_tokens=NEW, temperature=3.0, seed=seed)
        for one, seed in ((lm, 1), (split, 1), (lm, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_is_drawn_is_named_by_a_seed_of_the_command_line(root, monkeypatch):
    def generate(prompts, tokens, *, temperature, seed):
        seeds.append(seed)
        return prompts

    seeds, cfg = [], tiny.make_ttt_config(root)
    lm = types.SimpleNamespace(generate=generate, step=1)
    monkeypatch.setattr(language_model, "load_trained", lambda *_, **__: lm)
    for seed in (None, 7):
        tiny.call("generate", cfg, root, prompt=["a"], seed=seed)
    assert seeds == [cfg.seed, 7]
