"""benchmarks/peer.py: both sides compute the same before they are timed; here at tiny size, so that it cannot rot."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import common, peer, variants
from lw_jax.core.errors import UserError

pytest.importorskip("torch")

TINY = ("data.question_tokens=6", "data.answer_tokens=5", "encoder.window=24", "train.global_batch=3")
TINY = (*TINY, "eval.max_new_tokens=3")
OURS, _, W8A8 = variants.OURS


def words(config, *values):
    return ["--config", config, *(f"--config.{value}" for value in values), "--rounds", "1", "--steps", "1"]


def turn(*medians):
    own = {"first_seconds": 9.0, "peak_bytes": None, "host_bytes": 5e9}
    return [{"median": one, "seconds": [one, 2 * one], **own} for one in medians]


def test_latents_and_first_logits_are_compared_by_their_root_mean_square(tmp_path):
    for name, scale in (("theirs", 1.0), ("ours", 1.03)):
        whole = np.ones((2, 3), np.float32)
        np.savez(tmp_path / f"{name}.npz", latents=whole, **{"llama/logits": scale * whole, "llama/ids": scale * whole})
    ours, theirs = ({"file": str(tmp_path / f"{name}.npz")} for name in ("ours", "theirs"))
    assert variants.differences("encode", ours, theirs) == {"latents": 0}
    assert variants.differences("answer", ours, theirs) == {"llama/logits": pytest.approx(0.03, rel=1e-3)}


class Stand:
    """Stands for both sides: seconds and differences by a variant's name; None fails."""

    def __init__(self, seconds, wrong=()):
        self.args = peer.argparse.Namespace(rounds=2, steps=1)
        self.seconds, self.wrong, self.checked = seconds, wrong, []

    def turn(self, variant, part, *, warmup, steps):
        if (seconds := self.seconds[variant.side, variant.name]) is None:
            raise UserError("failed with code 1: InvalidCxxCompiler: no compiler")
        return turn(seconds)[0]

    def check(self, variant, part):
        self.checked.append(variant)
        return {"loss": 2.0, "grad_norm": 5.5 if (variant.side, variant.name) in self.wrong else 5.0}


STEP = [OURS, W8A8, variants.FP32, variants.FROZEN, dataclasses.replace(variants.FROZEN, compiled=True)]
NAMES = [(one.side, one.name) for one in STEP]


def test_best_of_each_side_goes_on_and_one_that_is_not_the_same_mathematics_does_not_count():
    stand = Stand(dict(zip(NAMES, (2.0, 1.0, 8.0, 6.0, 5.0), strict=True)))
    told = peer.compare(stand, "step", STEP)
    assert told["best"] == {"ours": "fp32", "theirs": NAMES[-1][1]} and told["ratio"]["median"] == 2.5
    assert [len(row["turns"]) for row in told["rows"]] == [2, 1, 1, 1, 2]
    assert stand.checked.count(STEP[-1]) == 1, "what is best is checked in just that form"


@pytest.mark.parametrize(("wrong", "second"), [(NAMES[-1], 6.0), (NAMES[-2], 5.0)])
def test_variant_that_computes_something_else_is_refused(wrong, second):
    told = peer.compare(Stand(dict(zip(NAMES, (2.0, 1.0, 8.0, 6.0, 5.0), strict=True)), {wrong}), "step", STEP)
    assert told["ratio"]["median"] == second / 2
    (row,) = [row for row in told["rows"] if (row["side"], row["variant"]) == wrong]
    assert not row["counted"] and "grad_norm" in row["why"]


def test_child_is_stopped_at_its_limit_and_its_reason_is_kept():
    with pytest.raises(UserError, match="longer than 0.5 s"):
        common.child(["-c", "import time; time.sleep(60)"], seconds=0.5)
    broken = "import sys; print('torch.X.SomeError: no compiler\\n\\nhint', file=sys.stderr); sys.exit(3)"
    with pytest.raises(UserError, match="code 3: torch.X.SomeError: no compiler"):
        common.child(["-c", broken], seconds=60)


def test_a_wire_that_learns_by_muon_is_timed_with_the_optimizer_of_the_other_side():
    flags = {"optim.kind": "muon"}
    assert common.load("configs/smoke.py", flags).optim.kind == "muon"
    assert peer.settle("configs/smoke.py", flags).optim.kind == "adamw"


@pytest.mark.slow
def test_wire_of_two_families_is_the_same_in_torch_in_every_part(tmp_path):
    file = tmp_path / "told.json"
    parts = ("--parts", "step,encode,answer", "--json", str(file))
    assert peer.main([*words("configs/smoke.py", *TINY), *parts]) == 0
    told = json.loads(file.read_text())
    assert told["check"]["ours"]["grad_norm"] > 0.1
    assert set(told["theirs_over_ours_best"]) == {"step", "encode", "answer"}
    assert all(value > 0 for value in told["theirs_over_ours_best"].values())
    for part in told["check"]["difference"].values():
        assert 0 < max(part.values()) < variants.TOLERANCE["fp32"]


@pytest.mark.slow
def test_preference_step_is_the_same_in_trl(tmp_path):
    pytest.importorskip("trl")
    values = ("llms.policy.source=selfmade:llama", "llms.policy.sha256=", "llms.policy.weights=fp32")
    file = tmp_path / "told.json"
    flags = words("configs/dpo/smollm2.py", *values, "dpo.max_length=16", "train.global_batch=2")
    assert peer.main([*flags, "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert max(told["check"]["difference"]["step"].values()) < variants.TOLERANCE["fp32"]
    assert abs(told["check"]["ours"]["loss"] - np.log(2)) > 1e-3, "pairs of LoRA that are zero would prove nothing"
    assert told["theirs_over_ours_best"]["step"] > 0


def test_another_step_is_told_and_not_timed(monkeypatch, capsys):
    sides = iter([{"device": "cpu"}, {"loss": 1.0, "grad_norm": 1.0}, {"loss": 1.1, "grad_norm": 1.0}])
    monkeypatch.setattr(peer.common, "child", lambda words, **settings: next(sides))
    assert peer.main(words("configs/smoke.py")) == 1
    assert "nothing is timed" in capsys.readouterr().err


def test_recipe_encoder_or_part_without_a_peer_is_refused():
    with pytest.raises(UserError, match="'ttt' has no peer"):
        peer.main(words("configs/ttt/ttt_smoke.py"))
    with pytest.raises(UserError, match="window pooling"):
        peer.main(words("configs/smoke.py", "encoder.pooling=queries", "adapter.start=random"))
    with pytest.raises(UserError, match="--parts answer: recipe 'dpo'"):
        peer.main([*words("configs/dpo/smollm2.py"), "--parts", "step,answer"])
