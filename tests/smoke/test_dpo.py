"""Preference tuning by its commands: trains, goes on from a checkpoint to the same bits, exports what it learned."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from lw_jax.core import config
from lw_jax.data import question_cards
from tests import tiny
from tests.commands import PROJECT, Done, start_several

STEPS = 24
GENERATION, END = {"do_sample": True, "temperature": 0.6}, 7  # of the model's folder


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A tiny model of packed matrices and pairs that prefer the polite answer, in a folder of its own."""
    here = tmp_path_factory.mktemp("dpo")
    tiny.write_reader(here / "model", "llama", head_dim=16, width=64, ffn=128)
    (here / "model" / "generation_config.json").write_text(json.dumps({**GENERATION, "eos_token_id": END}), "utf-8")
    rows = []
    for number, card in enumerate(question_cards.make(240, facts=1, seed=1, split="train")):
        asked = {"prompt": f"{number} {card.question}"}
        rows.append(asked | {"chosen": f"{card.answers[0]}, please", "rejected": f"{card.answers[0]} you fool"})
    (here / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return here


@pytest.fixture(scope="module")
def done(here) -> dict[str, Done]:
    """A run and its adapter; then, in another process, the run again without its newest checkpoint, and other verbs."""
    flags = {
        **{"llms.policy.source": "model", "llms.policy.sha256": "", "llms.policy.template": "plain"},
        **{"llms.policy.weights": "nf4", "data.train": "pairs.jsonl", "dpo.max_length": 64, "lora.rank": 4},
        **{"train.steps": STEPS, "train.checkpoint_every": STEPS // 2, "train.eval_every": STEPS // 2},
        **{"train.log_every": 1, "optim.learning_rate": 5e-3, "optim.warmup_steps": 2, "compute.remat": "none"},
    }
    at = ["--workdir", "run"]
    train = ["--config", str(PROJECT / "configs/dpo/smollm2.py"), *at]
    train += config.flags(flags)
    environ = os.environ | {"LW_JAX_CACHE": str(here / "cache"), "PYTHONPATH": str(PROJECT)}
    first = {"train": train, "export": ["export", *at, "--peft", "straight"]}
    found = start_several(first, cwd=here, environ=environ)
    shutil.rmtree(here / "run" / "checkpoints" / str(STEPS))
    second = {
        "train again": train,
        "export again": ["export", *at, "--peft", "adapter", "--merged", "whole"],
        "eval": ["eval", *at],
        "export nothing": ["export", *at],
        "report": ["report", *at],
    }
    return found | start_several(second, cwd=here, environ=environ)


def test_every_command_ends_as_it_should(done):
    codes = {name: code for name, (code, _, _) in done.items()}
    assert {name for name, code in codes.items() if code} == {"eval", "export nothing"}, done
    assert codes["eval"] == codes["export nothing"] == 2
    assert "lora.targets 'q_proj': self_attn.q_proj, in each of 2 layers" in done["train"][1]


def rows_of(here):
    return [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]


def test_loss_starts_at_log_two_and_held_out_pairs_are_told_apart(here, done):
    rows = rows_of(here)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5), "policy and reference are the same at first"
    assert losses[-1] < 0.5 * losses[0]
    held_out = [row for row in rows if "validation/rewards/accuracies" in row]
    assert held_out[-1]["validation/rewards/accuracies"] > 0.9 and held_out[-1]["validation/rewards/margins"] > 0
    assert {"validation/logps/chosen", "validation/logits/rejected", "validation/rewards/chosen"} <= set(held_out[-1])


def test_a_run_that_lost_its_end_resumes_to_the_same_bits(here, done):
    assert f"from step {STEPS // 2}" in done["train again"][1]
    assert "accuracy of pairs" in (here / "run" / "report.html").read_text("utf-8")
    one, other = (load_file(here / name / "adapter_model.safetensors") for name in ("straight", "adapter"))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_exported_adapter_in_peft_and_merged_model_say_the_same(here, done):
    assert f"step {STEPS}: adapter for model in adapter" in done["export again"][1]
    torch, peft, transformers = map(pytest.importorskip, ("torch", "peft", "transformers"))
    ids = torch.tensor(np.random.default_rng(0).integers(0, 300, (2, 9)))

    def logits(folder, adapter=None):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return (peft.PeftModel.from_pretrained(model, adapter) if adapter else model)(input_ids=ids).logits.numpy()

    beside, merged = logits(here / "model", here / "adapter"), logits(here / "whole")
    assert np.abs(beside - logits(here / "model")).max() > 0.1
    np.testing.assert_allclose(merged, beside, atol=0.05 * np.abs(beside).max())  # saved as bf16
    saved = json.loads((here / "whole" / "generation_config.json").read_text("utf-8"))
    assert saved | GENERATION == saved and END in saved["eos_token_id"]
