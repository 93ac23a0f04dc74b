"""benchmarks/peer.py: both sides compute the same before they are timed; here at tiny size, so that it cannot rot."""

import json

import numpy as np
import pytest

from benchmarks import common, peer
from lw_jax.core.errors import UserError

pytest.importorskip("torch")

TINY = ("data.question_tokens=6", "data.answer_tokens=5", "encoder.window=24", "train.global_batch=3")


def words(config, *values):
    return ["--config", config, *(f"--config.{value}" for value in values), "--rounds", "1", "--steps", "1"]


def turn(*medians):
    return [
        {"median": one, "seconds": [one, 2 * one], "first_seconds": 9.0, "peak_bytes": None, "device": "card"}
        for one in medians
    ]


def test_ratio_is_of_the_medians_and_of_each_pair_of_turns():
    found = peer.ratio({"ours": turn(1.0, 2.0, 1.0), "theirs": turn(3.0, 3.0, 4.0)})
    assert found == {"median": 3.0, "least": 1.5, "most": 4.0}


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        ({"loss": 2.001, "grad_norm": 5.0}, True),
        ({"loss": 2.01, "grad_norm": 5.0}, False),
        ({"loss": 2.0, "grad_norm": 5.1}, False),
    ],
)
def test_sides_agree_in_loss_and_gradient(theirs, same):
    assert peer.agree({"loss": 2.0, "grad_norm": 5.0}, theirs) is same


def test_a_wire_that_learns_by_muon_is_timed_with_the_optimizer_of_the_other_side():
    flags = {"optim.kind": "muon"}
    assert common.load("configs/smoke.py", flags).optim.kind == "muon"
    assert peer.settle("configs/smoke.py", flags).optim.kind == "adamw"


@pytest.mark.slow
def test_wire_of_two_families_is_the_same_in_torch(tmp_path, capsys):
    file = tmp_path / "told.json"
    assert peer.main([*words("configs/smoke.py", *TINY), "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert peer.agree(told["check"]["ours"], told["check"]["theirs"]) and told["check"]["ours"]["grad_norm"] > 0.1
    assert told["ratio"]["median"] > 0 and "theirs / ours" in capsys.readouterr().out


@pytest.mark.slow
def test_preference_step_is_the_same_in_trl(tmp_path):
    pytest.importorskip("trl")
    values = ("llms.policy.source=selfmade:llama", "llms.policy.sha256=", "llms.policy.weights=fp32")
    file = tmp_path / "told.json"
    flags = words("configs/dpo/smollm2.py", *values, "dpo.max_length=16", "train.global_batch=2")
    assert peer.main([*flags, "--json", str(file)]) == 0
    told = json.loads(file.read_text())["check"]
    assert peer.agree(told["ours"], told["theirs"])
    assert abs(told["ours"]["loss"] - np.log(2)) > 1e-3, "pairs of LoRA that are zero would prove nothing"


@pytest.mark.slow
def test_another_step_is_told_and_not_timed(monkeypatch, capsys):
    sides = iter([{"device": "cpu"}, {"loss": 1.0, "grad_norm": 1.0}, {"loss": 1.1, "grad_norm": 1.0}])
    monkeypatch.setattr(peer.common, "child", lambda words: next(sides))
    assert peer.main(words("configs/smoke.py")) == 1
    assert "nothing is timed" in capsys.readouterr().err


def test_recipe_or_encoder_without_a_peer_is_refused():
    with pytest.raises(UserError, match="'ttt' has no peer"):
        peer.main(words("configs/ttt/ttt_smoke.py"))
    with pytest.raises(UserError, match="window pooling"):
        peer.main(words("configs/smoke.py", "encoder.pooling=queries", "adapter.start=random"))
