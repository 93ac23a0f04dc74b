"""The gate that would have caught the original's doubly shifted labels: text NLL equals the reference's loss."""

import numpy as np
import pytest

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


def test_gold_answers_cost_what_transformers_says(tmp_path_factory):
    recipe = tiny.make_recipe(tmp_path_factory.getbasetemp() / "readers")
    for name, ours in gates.text_nll(recipe).items():
        theirs = reference_nll(recipe, name, len(ours))
        assert theirs.std() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=NLL)
