"""Writes ttt/*.safetensors: what the authors' own PyTorch class computes for six tiny TTT models.

    pip install torch==2.13.0 transformers==4.46.3 "numpy<2.3" safetensors
    git clone https://github.com/test-time-training/ttt-lm-pytorch && git -C ttt-lm-pytorch checkout cd831db
    python tests/reference/make_ttt_vectors.py ttt-lm-pytorch/ttt.py

A file holds a model ("weights/...", fp16, exact in fp32), ids, logits, loss, the gradient of every weight, the first
layer's memory after all tokens were decoded one by one, and the losses before each of five AdamW steps; its metadata
the configuration. Every weight is noisy, so that nothing is left at 0 or 1.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).with_name("ttt")
ROWS, LENGTH = 2, 37  # two whole chunks of 16 and a tail
BASE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mini_batch_size": 16,
    "ttt_layer_type": "linear",
    "ttt_base_lr": 1.0,
    "pre_conv": False,
    "share_qk": False,
    "use_gate": False,
    "conv_kernel": 4,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MAMBA = {"pre_conv": True, "share_qk": True, "use_gate": True}
MLP = {"ttt_layer_type": "mlp", "ttt_base_lr": 0.1}
MODELS = {
    "linear_transformer": {},
    "linear_mamba": MAMBA,
    "mlp_transformer": MLP,
    "mlp_mamba": {**MAMBA, **MLP},
    # Values that the others do not have: what is fixed in the layer must stay, what is configured must follow.
    "linear_odd": {
        **{"pre_conv": True, "mini_batch_size": 5, "conv_kernel": 3, "rope_theta": 37.0, "rms_norm_eps": 1e-3},
        **{"tie_word_embeddings": False, "ttt_base_lr": 0.7},
    },
    "mlp_odd": {**MLP, "share_qk": True, "mini_batch_size": 7, "rms_norm_eps": 1e-4},
}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def load_official(file: str) -> types.ModuleType:
    """Imports the authors' single file."""
    spec = importlib.util.spec_from_file_location("official_ttt", file)
    assert spec and spec.loader, file
    module = importlib.util.module_from_spec(spec)
    sys.modules["official_ttt"] = module
    spec.loader.exec_module(module)
    return module


def make_noisy(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Moves every weight by noise and rounds it to fp16; some token factors fall below their clamp."""
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            size = 0.3 if name.endswith(("learnable_token_idx", "bias", "b1", "b2")) else 0.1
            weight.add_(size * torch.randn(weight.shape, generator=generator))
            weight.copy_(weight.half().float())


def main(file: str) -> None:
    """Writes one file a model."""
    official = load_official(file)
    FOLDER.mkdir(exist_ok=True)
    for number, (name, changes) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        generator = torch.Generator().manual_seed(100 + number)
        fields = {**BASE, **changes}
        model = official.TTTForCausalLM(official.TTTConfig(**fields)).eval()
        make_noisy(model, generator)
        found = {f"weights/{key}": value.half() for key, value in model.named_parameters()}
        ids = torch.randint(0, fields["vocab_size"], (ROWS, LENGTH), generator=generator)
        out = model(ids, labels=ids)
        out.loss.backward()
        found |= {"ids": ids.int(), "logits": out.logits.detach(), "loss": out.loss.detach().reshape(1)}
        found |= {f"gradients/{key}": value.grad for key, value in model.named_parameters()}
        found |= decode(official, model, ids) | {"adamw": train(model, ids)}
        contiguous = {key: value.contiguous().clone() for key, value in found.items()}
        save_file(contiguous, FOLDER / f"{name}.safetensors", metadata={"config": json.dumps(fields)})
        print(name, sum(value.numel() for value in model.parameters()), float(out.loss))


def decode(official: types.ModuleType, model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the first layer's fast weights and waiting gradients after single-token steps."""
    with torch.no_grad():
        cache = official.TTTCache(model.model, ids.shape[0])
        for column in range(ids.shape[1]):
            model(ids[:, column : column + 1], cache_params=cache, use_cache=True)
    found = {}
    for key in [key for key in ("W1", "b1", "W2", "b2") if f"{key}_states" in cache.ttt_params_dict]:
        for kind in ("states", "grad"):
            found[f"{kind}/{key}"] = cache.ttt_params_dict[f"{key}_{kind}"][0]
    return found


def train(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns the losses before each of five steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


if __name__ == "__main__":
    main(sys.argv[1])
