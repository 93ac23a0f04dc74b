"""Writes trl_dpo.json: losses and gradients that TRL's own trainer computes from made log-probabilities.

    pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0
    python tests/reference/make_trl_vectors.py
    # and in another environment, for `sigmoid` with label smoothing, which later versions dropped:
    pip install torch==2.13.0 trl==0.19.1 transformers==4.53.3 "datasets<4" "accelerate<1.9"
    python tests/reference/make_trl_vectors.py

Each run replaces the part of the file that belongs to the installed version. The trainer's own method runs, in double
precision, on an object that holds settings alone and a model that answers with the made log-probabilities.
"""

import collections
import datetime
import functools
import json
import random
import re
import types
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
import trl

FILE = Path(__file__).with_name("trl_dpo.json")
KINDS = "sigmoid ipo hinge robust sigmoid_norm apo_zero apo_down nca_pair bco_pair sft".split()
BETAS = (0.05, 0.1, 0.5)
SMOOTHING = 0.1
MIXTURES = ((("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.0)), (("hinge", "robust"), (2.0, 0.3)))  # the first: MPO
PROMPT = 3  # tokens
GRID = 64  # log-probabilities are multiples of 1/64: differences of them are exact in fp32


def make_pairs() -> dict[str, list[float]]:
    """Returns columns: policy and reference log-probabilities of both completions, and their lengths."""
    rng = random.Random(0)
    # Log-ratios (chosen, rejected): at the reference, on hinge's corner for beta 0.5, tiny, large either way, drawn.
    ratios = [(0.0, 0.0), (1.25, -0.75), (1 / GRID, 0.0), (-0.5, -0.5 + 1 / GRID), (60.0, -55.5), (-48.0, 71.25)]
    ratios += [(round(rng.gauss(0, 5) * GRID) / GRID, round(rng.gauss(0, 5) * GRID) / GRID) for _ in range(5)]
    pairs = collections.defaultdict(list)
    for chosen, rejected in ratios:
        for name, ratio in (("chosen", chosen), ("rejected", rejected)):
            tokens = rng.randint(1, 97)
            reference = -round(tokens * rng.uniform(0.3, 3) * GRID) / GRID
            pairs[f"{name}_tokens"].append(tokens)
            pairs[f"ref_{name}"].append(reference)
            pairs[name].append(reference + ratio)
    return dict(pairs)


class Answers(torch.nn.Module):
    """A model that spreads each completion's made log-probability evenly over its tokens."""

    def __init__(self, sums: torch.Tensor, mask: torch.Tensor):
        super().__init__()
        share = mask[:, 1:].to(sums.dtype)
        self.log_probs = sums[:, None] * share / share.sum(dim=1, keepdim=True)

    def forward(self, **_: object) -> types.SimpleNamespace:
        empty = torch.zeros_like(self.log_probs)
        return types.SimpleNamespace(
            log_probs=self.log_probs, entropy=empty, mean_logits=empty, is_top1=empty.bool(), aux_loss=None
        )


class Accelerator:
    """One process on the CPU."""

    device = torch.device("cpu")

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    gather_for_metrics = gather


def run_newest(pairs: dict, kinds: tuple, weights: tuple, beta: float, smoothing: float) -> dict:
    """Returns the batch's loss, its gradients and its metrics by `DPOTrainer._compute_loss`."""
    column = {name: torch.tensor(values, dtype=torch.float64) for name, values in pairs.items()}
    lengths = PROMPT + torch.cat([column["chosen_tokens"], column["rejected_tokens"]]).long()[:, None]
    places = torch.arange(int(lengths.max()))[None, :]
    attended, mask = (places < lengths).long(), ((places >= PROMPT) & (places < lengths)).long()
    chosen, rejected = column["chosen"].requires_grad_(), column["rejected"].requires_grad_()
    trainer = object.__new__(trl.DPOTrainer)
    trainer.model = Answers(torch.cat([chosen, rejected]), mask)
    trainer.accelerator, trainer._metrics = Accelerator(), {"train": collections.defaultdict(list)}
    trainer.loss_types, trainer.loss_weights = list(kinds), list(weights)
    trainer.beta, trainer.label_smoothing = beta, smoothing
    trainer.precompute_ref_logps, trainer.f_divergence_type = True, "reverse_kl"
    trainer.aux_loss_enabled = trainer.use_weighting = False
    trainer.ld_alpha, trainer._total_train_tokens, trainer._tp_size = None, 0, 1
    inputs = {"input_ids": attended, "attention_mask": attended, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": column["ref_chosen"], "ref_rejected_logps": column["ref_rejected"]}
    value = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    metrics = trainer._metrics["train"]
    return collect(value, chosen, rejected) | {
        "metrics": {name: metrics[name][0] for name in metrics if name.startswith(("rewards/", "logps/"))}
    }


def run_019(pairs: dict, kind: str, beta: float, smoothing: float) -> dict:
    """Returns one pair's loss and its gradients by `DPOTrainer.dpo_loss`."""
    column = {name: torch.tensor(values, dtype=torch.float64) for name, values in pairs.items()}
    chosen, rejected = column["chosen"].requires_grad_(), column["rejected"].requires_grad_()
    trainer = object.__new__(trl.DPOTrainer)
    trainer.accelerator, trainer.loss_type, trainer.beta, trainer.label_smoothing = Accelerator(), kind, beta, smoothing
    trainer.reference_free, trainer.f_divergence_type = False, "reverse_kl"
    each, _, _ = trainer.dpo_loss(chosen, rejected, column["ref_chosen"], column["ref_rejected"])
    return collect(each.mean(), chosen, rejected)


def collect(value: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor) -> dict:
    gradients = torch.autograd.grad(value, (chosen, rejected), allow_unused=True, materialize_grads=True)
    return {"loss": value.item(), "chosen": gradients[0].tolist(), "rejected": gradients[1].tolist()}


def one_by_one(pairs: dict, run: Callable[[dict], dict]) -> dict:
    """Returns columns of losses and gradients, each pair being a batch of its own."""
    found = [run({name: [values[i]] for name, values in pairs.items()}) for i in range(len(pairs["chosen"]))]
    columns = {"loss": [row["loss"] for row in found]}
    return columns | {name: [row[name][0] for row in found] for name in ("chosen", "rejected")}


def make_newest(pairs: dict) -> dict:
    cases, batches = [], []
    for beta in BETAS:
        for kind in KINDS:
            for smoothing in (0.0, SMOOTHING) if kind == "robust" else (0.0,):
                run = functools.partial(run_newest, kinds=(kind,), weights=(1.0,), beta=beta, smoothing=smoothing)
                found = one_by_one(pairs, run)
                cases.append({"kind": kind, "beta": beta, "label_smoothing": smoothing} | found)
    for kinds, weights in (*MIXTURES, (("sft",), (1.0,))):
        batch = {"kinds": kinds, "weights": weights, "beta": BETAS[1], "label_smoothing": 0.0}
        batches.append(batch | run_newest(pairs, kinds, weights, BETAS[1], 0.0))
    return {"cases": cases, "batches": batches}


def make_019(pairs: dict) -> dict:
    cases = []
    for beta in BETAS:
        for kind in ("sigmoid", "robust"):
            found = one_by_one(pairs, functools.partial(run_019, kind=kind, beta=beta, smoothing=SMOOTHING))
            cases.append({"kind": kind, "beta": beta, "label_smoothing": SMOOTHING} | found)
    return {"cases": cases}


def shorten(values: object) -> object:
    """Rounds to 12 digits."""
    if isinstance(values, dict):
        return {name: shorten(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [shorten(value) for value in values]
    return float(f"{values:.12g}") if isinstance(values, float) else values


def main() -> None:
    pairs = make_pairs()
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    versions = kept.get("trl", {}) if kept.get("pairs") == pairs else {}
    versions[trl.__version__] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
        **(make_019(pairs) if trl.__version__.startswith("0.") else make_newest(pairs)),
    }
    text = json.dumps({"pairs": pairs, "trl": shorten(dict(sorted(versions.items())))}, indent=1)
    text = re.sub(r"\[([^][{}]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)  # numbers on one line
    FILE.write_text(text + "\n", encoding="utf-8")
    print(f"{FILE}: {FILE.stat().st_size} bytes, TRL {', '.join(versions)}")


if __name__ == "__main__":
    main()
