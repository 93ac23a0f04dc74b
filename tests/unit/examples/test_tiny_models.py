"""examples/tiny_models.py: every family's folder is read as by transformers, and a wire is trained by one command."""

import numpy as np
import pytest

import lw_jax
import run
from examples import tiny_models, with_transformers
from lw_jax.core.errors import UserError
from lw_jax.training import metrics

LOGITS = 2e-5  # of the logits' size, fp32: the same sums in another order
TEXTS = ["Mara", "Mara Ellis lives in Lisbon. Where does Mara Ellis live?", "Tom Reed works as a baker."]


@pytest.mark.parametrize("family", tiny_models.MODELS)
def test_logits_of_a_folder_equal_those_of_transformers(family, own_models):
    import torch
    from transformers import AutoModelForCausalLM

    lm = lw_jax.load_lm(own_models[family])
    model = AutoModelForCausalLM.from_pretrained(own_models[family], dtype=torch.float32).eval()
    assert model.config.model_type == family
    tokens = lm.tokenizer
    for text in TEXTS:
        ids = np.array([[*tokens.begin, *tokens.encode(text)]])
        assert tokens.decode(ids[0]) == text and ids.max() < lm.config.vocab
        with torch.no_grad():
            theirs = model(torch.tensor(ids)).logits.numpy()
        assert theirs.std() > 0.5, "logits too flat for the comparison to mean anything"
        np.testing.assert_allclose(lm.logits(ids), theirs, atol=LOGITS * theirs.std())


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "kind"), [(("llama", "qwen2"), "embeddings"), (("phi3", "stablelm"), "kv")])
def test_one_command_trains_every_family_and_transformers_answers_from_it(pair, kind, own_models, tmp_path, capsys):
    folders = [own_models[family] for family in pair]
    words = ["--config", "configs/smoke.py", "--workdir", str(tmp_path / "run"), "--config.train.steps=20"]
    words += ["--config.mesh.placement=single", "--config.compute.remat=none"]
    words += [f"--config.encoder.source={folders[0]}", f"--config.adapter.kind={kind}"]
    words += [f"--config.llms.{name}.source={folder}" for name, folder in zip(("llama", "qwen"), folders, strict=True)]
    assert run.main(words) == 0
    losses = [
        row["train/loss"] for row in metrics.read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row
    ]
    assert losses[-1] < losses[0]
    (tmp_path / "notes.txt").write_text(TEXTS[1], "utf-8")
    asked = ["--workdir", str(tmp_path / "run"), "--context", str(tmp_path / "notes.txt"), "--question", "Who?"]
    for name, folder in zip(("llama", "qwen"), folders, strict=True):
        capsys.readouterr()
        assert with_transformers.main([*asked, "--reader", name, "--question", "Where does she live?"]) == 0
        said = capsys.readouterr().out
        assert str(folder) in said and "2 of 2 answers are equal" in said
    with pytest.raises(UserError, match="--reader gemma.*llama, qwen"):
        with_transformers.main([*asked, "--reader", "gemma"])
