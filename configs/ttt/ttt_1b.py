"""TTT-Linear of 1,322,243,200 parameters (GPT-2's 50,257 tokens): ttt_125m.py at the authors' next size, 26 B tokens.

python run.py --config configs/ttt/ttt_1b.py
"""

from ml_collections import ConfigDict

from configs.ttt import ttt_125m


def get_config(recipe: str = "ttt") -> ConfigDict:
    """Returns the authors' recipe for this size."""
    c = ttt_125m.get_config(recipe)
    c.ttt.layers = 24
    c.ttt.width = 2048
    c.ttt.heads = 32
    c.ttt.ffn = 5504
    c.optim.learning_rate = 1e-3
    c.optim.warmup_steps = 5000
    c.optim.end_fraction = 1e-5 / 1e-3
    c.train.steps = 50000
    return c
