"""benchmarks/peer.py: both sides compute the same before they are timed; here at tiny size, so that it cannot rot."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import peer
from lw_jax.core.errors import UserError

pytest.importorskip("torch")

TINY = ("data.question_tokens=6", "data.answer_tokens=5", "encoder.window=24", "train.global_batch=3")
TINY = (*TINY, "eval.max_new_tokens=3", "selfmade.steps=2")
OURS, _, W8A8 = peer.OURS


def words(config, *values):
    return ["--config", config, *(f"--config.{value}" for value in values), "--rounds", "1", "--steps", "1"]


def turn(*medians):
    own = {"first_seconds": 9.0, "peak_bytes": None, "host_bytes": 5e9}
    return [{"median": one, "seconds": [one, 2 * one], **own} for one in medians]


class Stand:
    """Stands for both sides: seconds and differences by a variant's name; None fails."""

    def __init__(self, seconds, wrong=()):
        self.seconds, self.wrong, self.checked = seconds, wrong, []

    def turn(self, variant, part, *, warmup, steps):
        if (seconds := self.seconds[variant.side, variant.name]) is None:
            raise UserError("failed with code 1: InvalidCxxCompiler: no compiler")
        return turn(seconds)[0]

    def check(self, variant, part):
        self.checked.append(variant)
        return {"loss": 2.0, "grad_norm": 5.5 if (variant.side, variant.name) in self.wrong else 5.0}


STEP = [OURS, W8A8, peer.FP32, peer.FROZEN, dataclasses.replace(peer.FROZEN, compiled=True)]
NAMES = [(one.side, one.name) for one in STEP]


@pytest.mark.parametrize(("wrong", "second"), [(NAMES[-1], 6.0), (NAMES[-2], 5.0)])
def test_variant_that_computes_something_else_is_refused(wrong, second):
    sides = Stand(dict(zip(NAMES, (2.0, 1.0, 8.0, 6.0, 5.0), strict=True)), {wrong})
    told = peer.compare(sides, "step", STEP, 2, 1)
    assert told["ratio"]["median"] == second / 2
    (row,) = [row for row in told["rows"] if (row["side"], row["variant"]) == wrong]
    assert not row["counted"] and "grad_norm" in row["why"]


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
        assert 0 < max(part.values()) < peer.TOLERANCE["fp32"]


@pytest.mark.slow
def test_preference_step_is_the_same_in_trl(tmp_path):
    pytest.importorskip("trl")
    values = ("llms.policy.source=selfmade:llama", "llms.policy.sha256=", "llms.policy.weights=fp32")
    file = tmp_path / "told.json"
    flags = words("configs/dpo/smollm2.py", *values, "selfmade.steps=2", "dpo.max_length=16", "train.global_batch=2")
    assert peer.main([*flags, "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert max(told["check"]["difference"]["step"].values()) < peer.TOLERANCE["fp32"]
    assert abs(told["check"]["ours"]["loss"] - np.log(2)) > 1e-3, "pairs of LoRA that are zero would prove nothing"
    assert told["theirs_over_ours_best"]["step"] > 0


def test_recipe_encoder_or_part_without_a_peer_is_refused():
    with pytest.raises(UserError, match="'ttt' has no peer"):
        peer.main(words("configs/ttt/ttt_smoke.py"))
    with pytest.raises(UserError, match="window pooling"):
        peer.main(words("configs/smoke.py", "encoder.pooling=queries", "adapter.start=random"))
    with pytest.raises(UserError, match="--parts answer: recipe 'dpo'"):
        peer.main([*words("configs/dpo/smollm2.py"), "--parts", "step,answer"])
