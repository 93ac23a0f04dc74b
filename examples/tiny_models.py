"""Makes a tiny model of each family with random weights, as transformers saves it, each with a tokenizer of its own.

    python examples/tiny_models.py --out models
    python run.py --config configs/smoke.py --config.train.steps=30 --config.encoder.source=models/llama \
        --config.llms.llama.source=models/llama --config.llms.qwen.source=models/qwen2

The folders models/llama, qwen2, phi3 and stablelm stand in for pretrained ones: a source that works for them works for
a model of the same family. They have learned nothing. Needs torch; some seconds, 1 MB a model.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import torch_needed
from lw_jax.core import environment
from lw_jax.core.errors import leave

MATRICES = 0.1  # their standard deviation: at transformers' 0.02 every text has the same likeliest token
VECTORS = 0.2  # of what is added to norms and biases, which begin at exactly 1 and 0 and so would hide an error in them
CARDS = 256  # whose text a tokenizer is trained on


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's tokenizer and the fields of its config.json that are its own."""

    tokenizer: tuple[int, str, str, str]  # size, BOS text (empty: none), end, padding: `selfmade.Vocabulary`
    fields: dict[str, Any]


def _size(width: int, heads: int, kv_heads: int, ffn: int, layers: int) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")
    return dict(zip(names, (width, heads, kv_heads, ffn, layers), strict=True))


# By model_type. Vocabularies, sizes and what is a family's own differ as between pretrained models.
MODELS = {
    "llama": Model((512, "<s>", "</s>", "<pad>"), _size(64, 4, 2, 136, 2)),
    "qwen2": Model((640, "", "<|im_end|>", "<|endoftext|>"), _size(96, 8, 4, 200, 3) | {"tie_word_embeddings": True}),
    "phi3": Model((448, "<s>", "<|end|>", "<|endoftext|>"), _size(80, 4, 4, 152, 2) | {"sliding_window": 2047}),
    "stablelm": Model(
        (576, "", "<|im_end|>", "<|endoftext|>"),
        _size(64, 4, 4, 184, 2) | {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the models' folders are put")
    parser.add_argument("--families", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args(argv)
    torch_needed.check()
    environment.hide_idle_cuda()  # before anything imports JAX
    for family in args.families:
        count = make(args.out / family, family, seed=args.seed)
        print(f"{args.out / family}: {count:,} random weights, {MODELS[family].tokenizer[0]} tokens", flush=True)
    return 0


def make(folder: Path, family: str, *, seed: int = 0, **fields: Any) -> int:
    """Writes a family's model with its tokenizer and returns the number of its weights; `fields` change config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from lw_jax.data import question_cards
    from lw_jax.data.tokens import load_tokenizer
    from lw_jax.recipes.selfmade import Vocabulary, write_tokenizer

    logging.disable_progress_bar()
    model, texts = MODELS[family], question_cards.make(CARDS, facts=4, seed=list(MODELS).index(family), split="train")
    vocabulary = Vocabulary(*model.tokenizer)
    write_tokenizer(folder, vocabulary, [f"{card.context} {card.question} {card.answers[0]}" for card in texts])
    tokens = load_tokenizer(folder)
    known = {
        "vocab_size": vocabulary.vocab,
        "bos_token_id": tokens.begin[0] if tokens.begin else None,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
        "max_position_embeddings": 4096,
        "initializer_range": MATRICES,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family, **(known | model.fields | fields))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for value in made.parameters():
                if value.ndim == 1:
                    value.add_(VECTORS * torch.randn_like(value))
    made.save_pretrained(folder)
    return made.num_parameters()


if __name__ == "__main__":
    leave(main)
