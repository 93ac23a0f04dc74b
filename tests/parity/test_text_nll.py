"""The gate that would have caught the original's doubly shifted labels: text NLL equals the reference's loss."""

import numpy as np
import pytest

from lw_jax.recipes.surprisal import Surprisal
from tests import gates, tiny

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -r requirements-dev.txt")
transformers = pytest.importorskip("transformers")

NLL = 1e-4  # nats, summed over an answer


def reference_nll(recipe, name: str, count: int) -> np.ndarray:
    """transformers' own loss on prompt and answer tokenised jointly, in text, by the tokenizer alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(recipe.locations[name]).eval()
    tokenizer, prompt = recipe.tokenizers[name], recipe.cfg.prompt
    found = []
    for example in recipe.data("validation").examples[:count]:
        asked = prompt.user.format(context=example.context, question=example.question) + prompt.anchor
        opening = [*tokenizer.begin, *tokenizer.encode(asked)]
        ids = [*tokenizer.begin, *tokenizer.encode(f"{asked} {example.answers[0]}"), tokenizer.eos]
        assert ids[: len(opening)] == opening
        labels = torch.tensor([[-100] * len(opening) + ids[len(opening) :]])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=labels).loss
        found.append(float(loss) * (len(ids) - len(opening)))
    return np.array(found)


def test_gold_answers_cost_what_transformers_says(root):
    recipe = tiny.make_recipe(root)
    for name, ours in gates.text_nll(recipe).items():
        theirs = reference_nll(recipe, name, len(ours))
        assert theirs.std() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=NLL)


def test_surprisal_of_a_text_is_transformers_loss(root, tmp_path, monkeypatch):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    recipe = tiny.make_recipe(root, only="qwen", compute__dtype="fp32")
    text = recipe.data("validation").examples[0].context
    found = Surprisal(recipe.cfg, recipe.locations["qwen"], recipe.placement)
    (scored,) = found.score([text])
    ids = torch.tensor([[*found.begin, *recipe.tokenizers["qwen"].encode(text)]])
    model = transformers.AutoModelForCausalLM.from_pretrained(recipe.locations["qwen"]).eval()
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert scored.values.mean() == pytest.approx(loss, rel=1e-3)  # kept in fp16
    assert scored.values.std() > 0.1
