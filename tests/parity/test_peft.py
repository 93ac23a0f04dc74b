"""Adapter folders of Hugging Face PEFT: what PEFT makes of ours."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


# Of phi3's fused modules a part may have no pair: it has zeros.
@pytest.mark.parametrize(("family", "names"), [*((family, ALL) for family in FAMILIES), ("phi3", ("q", "v", "up"))])
def test_peft_gives_the_same_logits_from_our_folder(tmp_path, family, names):
    cfg, spec = FAMILIES[family], lora.Lora(rank=3, alpha=5.0, dropout=0.1, names=names)
    params, pairs = base_model(tmp_path / "base", family), random(lora.abstract(cfg, spec), 0.3)
    folders.save(tmp_path / "adapter", pairs, spec, cfg=cfg, model_type=family, base=str(tmp_path / "base"))
    ours = our_logits(lora.attach(params, pairs, spec), cfg)
    theirs = their_logits(tmp_path / "base", tmp_path / "adapter")
    assert np.abs(ours - our_logits(params, cfg)).max() > 0.1 * np.abs(ours).max(), "the adapter does something"
    assert np.abs(ours - theirs).max() < LOGITS * max(1.0, np.abs(theirs).max())


def test_adapter_that_cannot_be_written_leaves_the_one_that_is_there(tmp_path, monkeypatch, small):
    before = tiny.contents(tmp_path)
    monkeypatch.setattr(Path, "write_text", tiny.no_space)
    with pytest.raises(OSError, match="No space left"):
        folders.save(tmp_path, jax.tree.map(lambda x: 2 * x, small), SMALL, cfg=LLAMA, model_type="llama", base="other")
    assert tiny.contents(tmp_path) == before


def test_weights_that_are_not_finite_are_not_written(tmp_path, small):
    file = tmp_path / "adapter_model.safetensors"
    before = file.read_bytes()
    for value in (np.nan, -np.inf):
        wrong = {"layers": {"q": small["layers"]["q"] | {"a": small["layers"]["q"]["a"].at[0, 0].set(value)}}}
        with pytest.raises(UserError, match=r"q_proj\.lora_A\.weight: a value is not finite, the run has diverged"):
            folders.save(tmp_path, wrong, SMALL, cfg=LLAMA, model_type="llama", base="here")
    assert file.read_bytes() == before
