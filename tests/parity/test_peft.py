"""Adapter folders of Hugging Face PEFT: what PEFT makes of ours, and what we make of PEFT's."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from lw_jax.core.errors import UserError
from lw_jax.hub import peft as folders
from lw_jax.hub import weights
from lw_jax.models import decoder, lora
from tests import tiny

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -r requirements-dev.txt")
peft = pytest.importorskip("peft", reason="parity needs peft: pip install -r requirements-dev.txt")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own

LOGITS = 1e-5  # fp32, of the logits' size
LLAMA = dataclasses.replace(tiny.DECODER, width=48, head_dim=8, qkv_bias=False)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True),
    "phi3": dataclasses.replace(LLAMA, window=9),
    "stablelm": dataclasses.replace(LLAMA, norm="layer", rotated=2, qkv_bias=True),
}
IDS = np.random.default_rng(0).integers(0, LLAMA.vocab, (2, 13))
ALL = tuple(lora.MODULES)
SMALL = lora.Lora(rank=2, alpha=2.0, dropout=0.0, names=("q",))


def random(tree, scale):
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(7)
    return treedef.unflatten([jnp.asarray(scale * rng.standard_normal(x.shape), jnp.float32) for x in leaves])


def base_model(folder, family):
    params = random(decoder.abstract(FAMILIES[family], jnp.float32), 0.2)
    weights.save(folder, params, FAMILIES[family], model_type=family)
    return params


@functools.partial(jax.jit, static_argnames="cfg")
def our_logits(params, cfg):
    x = decoder.embed(params, jnp.asarray(IDS))
    return decoder.logits(params, decoder.forward(params, cfg, x, mask=jnp.ones(IDS.shape, bool)).hidden)


def their_logits(base, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(IDS)).logits.numpy()


@pytest.fixture
def small(tmp_path):
    """The pairs of an adapter of one module, whose folder is `tmp_path`."""
    pairs = random(lora.abstract(LLAMA, SMALL), 0.1)
    folders.save(tmp_path, pairs, SMALL, cfg=LLAMA, model_type="llama", base="here")
    return pairs


def edit(folder, change):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


# Of phi3's fused modules a part may have no pair: it has zeros.
@pytest.mark.parametrize(("family", "names"), [*((family, ALL) for family in FAMILIES), ("phi3", ("q", "v", "up"))])
def test_peft_gives_the_same_logits_from_our_folder_and_we_read_it_back(tmp_path, family, names):
    cfg, spec = FAMILIES[family], lora.Lora(rank=3, alpha=5.0, dropout=0.1, names=names)
    params, pairs = base_model(tmp_path / "base", family), random(lora.abstract(cfg, spec), 0.3)
    folders.save(tmp_path / "adapter", pairs, spec, cfg=cfg, model_type=family, base=str(tmp_path / "base"))
    ours = our_logits(lora.attach(params, pairs, spec), cfg)
    theirs = their_logits(tmp_path / "base", tmp_path / "adapter")
    assert np.abs(ours - our_logits(params, cfg)).max() > 0.1 * np.abs(ours).max(), "the adapter does something"
    assert np.abs(ours - theirs).max() < LOGITS * max(1.0, np.abs(theirs).max())
    back, found = folders.load(tmp_path / "adapter", cfg)
    assert (found.rank, found.alpha, found.dropout) == (3, 5.0, 0.1) and set(names) <= set(found.names)
    assert np.abs(our_logits(lora.attach(params, back, found), cfg) - ours).max() < LOGITS * np.abs(ours).max()


@pytest.mark.filterwarnings("ignore:lora with eva")
@pytest.mark.parametrize("start", [False, "gaussian", "eva", "orthogonal", "mica"])
def test_peft_s_own_folder_means_the_same_here(tmp_path, start):
    base_model(tmp_path / "base", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    own = {"eva_config": peft.EvaConfig()} if start == "eva" else {}
    told = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=start, **own)
    model = peft.get_peft_model(model, told)
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.add_(0.1 * torch.randn_like(one) if ".lora_" in name else 0.0)
    model.save_pretrained(tmp_path / "adapter")
    pairs, spec = folders.load(tmp_path / "adapter", LLAMA)
    assert spec.names == ("q", "down")
    params = weights.load(tmp_path / "base", dtype=jnp.float32)
    ours = our_logits(lora.attach(params, pairs, spec), LLAMA)
    theirs = their_logits(tmp_path / "base", tmp_path / "adapter")
    assert np.abs(ours - theirs).max() < LOGITS * max(1.0, np.abs(theirs).max())


def test_adapter_that_cannot_be_written_leaves_the_one_that_is_there(tmp_path, monkeypatch, small):
    before = tiny.contents(tmp_path)
    monkeypatch.setattr(Path, "write_text", tiny.no_space)
    with pytest.raises(OSError, match="No space left"):
        folders.save(tmp_path, jax.tree.map(lambda x: 2 * x, small), SMALL, cfg=LLAMA, model_type="llama", base="other")
    assert tiny.contents(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all'"),
        ({"r": 0}, "r=0"),
        ({"r": 2.0}, "r=2.0"),
        ({"lora_alpha": "4"}, "lora_alpha='4'"),
        ({"alpha_pattern": {"q_proj": -3}}, "alpha_pattern"),
        ({"lora_dropout": 2}, "lora_dropout=2"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layers_to_transform": 0}, "layers_to_transform=0"),
        ({"megatron_config": {"num_layers": 3}}, "megatron_config"),
        ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens=\[5\]"),
        ({"of_a_later_version": "on"}, "of_a_later_version='on'"),
        *[
            ({"init_lora_weights": start}, f"init_lora_weights='{start}'")
            for start in ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga")
        ],
        ({"init_lora_weights": 2}, "init_lora_weights=2"),
    ],
)
@pytest.mark.usefixtures("small")
def test_adapters_of_another_kind_are_refused_by_name(tmp_path, change, told):
    edit(tmp_path, change)
    with pytest.raises(UserError, match=told):
        folders.load(tmp_path, LLAMA)


def test_weights_that_are_not_finite_are_neither_written_nor_read(tmp_path, small):
    file = tmp_path / "adapter_model.safetensors"
    before = file.read_bytes()
    for value in (np.nan, -np.inf):
        wrong = {"layers": {"q": small["layers"]["q"] | {"a": small["layers"]["q"]["a"].at[0, 0].set(value)}}}
        with pytest.raises(UserError, match=r"q_proj\.lora_A\.weight: a value is not finite, the run has diverged"):
            folders.save(tmp_path, wrong, SMALL, cfg=LLAMA, model_type="llama", base="here")
    assert file.read_bytes() == before
    stored = safetensors.numpy.load_file(file)
    next(iter(stored.values()))[0] = np.nan
    safetensors.numpy.save_file(stored, file)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: tensor .*not finite"):
        folders.load(tmp_path, LLAMA)


def test_adapter_that_its_alpha_makes_infinite_is_refused(tmp_path, small):
    small["layers"]["q"]["b"] = small["layers"]["q"]["b"].at[0].set(3e38)
    folders.save(tmp_path, small, SMALL, cfg=LLAMA, model_type="llama", base="here")
    edit(tmp_path, {"alpha_pattern": {"q_proj": 1e3}})
    with pytest.raises(UserError, match=r"q_proj times its alpha is too large"):
        folders.load(tmp_path, LLAMA)


@pytest.mark.usefixtures("small")
def test_adapter_of_another_model_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"layers\.3\..* is missing; this adapter is of another model"):
        folders.load(tmp_path, dataclasses.replace(LLAMA, layers=4))
    with pytest.raises(UserError, match="the model asks for"):
        folders.load(tmp_path, dataclasses.replace(LLAMA, width=40))
