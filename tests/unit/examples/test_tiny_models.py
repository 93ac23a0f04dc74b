"""examples/tiny_models.py: a wire of its folders is trained by one command.

That each is read as by transformers: test_with_transformers.py, token by token, and tests/parity.
"""

import pytest

import run
from examples import with_transformers
from lw_jax.core.errors import UserError
from tests import tiny

TEXT = "Mara Ellis lives in Lisbon. Where does Mara Ellis live?"


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "kind"), [(("llama", "qwen2"), "embeddings"), (("phi3", "stablelm"), "kv")])
def test_one_command_trains_every_family_and_transformers_answers_from_it(pair, kind, own_models, tmp_path, capsys):
    folders = [own_models[family] for family in pair]
    words = ["--config", "configs/smoke.py", "--workdir", str(tmp_path / "run"), "--config.train.steps=20"]
    words += ["--config.train.global_batch=8", "--config.train.eval_every=0", "--config.optim.warmup_steps=5"]
    words += ["--config.mesh.placement=single", "--config.compute.remat=none"]
    words += [f"--config.encoder.source={folders[0]}", f"--config.adapter.kind={kind}"]
    words += [f"--config.llms.{name}.source={folder}" for name, folder in zip(("llama", "qwen"), folders, strict=True)]
    assert run.main(words) == 0
    losses = tiny.logged_losses(tmp_path / "run")
    assert losses[-1] < losses[0]
    (tmp_path / "notes.txt").write_text(TEXT, "utf-8")
    asked = ["--workdir", str(tmp_path / "run"), "--context", str(tmp_path / "notes.txt"), "--question", "Who?"]
    for name, folder in zip(("llama", "qwen"), folders, strict=True):
        capsys.readouterr()
        assert with_transformers.main([*asked, "--reader", name, "--question", "Where does she live?"]) == 0
        said = capsys.readouterr().out
        assert str(folder) in said and "2 of 2 answers are equal" in said
    with pytest.raises(UserError, match="--reader gemma.*llama, qwen"):
        with_transformers.main([*asked, "--reader", "gemma"])
