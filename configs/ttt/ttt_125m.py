"""TTT-Linear of 124,298,064 parameters (GPT-2's 50,257 tokens) at 128 tokens, on whatever cards there are.

    python run.py --config configs/ttt/ttt_125m.py
    python run.py plan --config configs/ttt/ttt_125m.py --target h100x8

WikiText-103 (CC BY-SA 3.0) and GPT-2's tokenizer (MIT) come from the Hugging Face hub. The authors' recipe: 2.5 B
tokens, half a million a step; with 128 tokens a window where they have 2,048. Larger sizes: ttt_350m.py,
ttt_760m.py, ttt_1b.py. The inner MLP: --config.ttt.inner=mlp --config.ttt.inner_rate=0.1.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(recipe: str = "ttt") -> ConfigDict:
    """Returns the authors' recipe for this size."""
    c = base.get_config(recipe)
    c.ttt.tokenizer = "openai-community/gpt2"
    c.ttt.vocab = 50257
    c.ttt.table_multiple = 128
    c.data.train = "hub:Salesforce/wikitext:wikitext-103-raw-v1"
    c.optim.learning_rate = 3e-3
    c.optim.warmup_steps = 480
    c.optim.end_fraction = 1e-5 / 3e-3
    c.optim.weight_decay = 0.1
    c.optim.b2 = 0.95
    c.train.steps = 4800
    c.train.global_batch = 4096
    c.train.eval_every = 200
    c.train.checkpoint_every = 200
    c.compute.dtype = "bf16"
    c.compute.logits_chunk = 4096
    c.eval.examples = 1024
    c.eval.batch = 128
    return c
