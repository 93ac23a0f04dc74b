"""TTT-Linear of 761,061,120 parameters (GPT-2's 50,257 tokens): ttt_125m.py at the authors' next size, 15 B tokens.

python run.py --config configs/ttt/ttt_760m.py
"""

from ml_collections import ConfigDict

from configs.ttt import ttt_125m


def get_config(recipe: str = "ttt") -> ConfigDict:
    """Returns the authors' recipe for this size."""
    c = ttt_125m.get_config(recipe)
    c.ttt.layers = 24
    c.ttt.width = 1536
    c.ttt.heads = 16
    c.ttt.ffn = 4096
    c.optim.learning_rate = 1.25e-3
    c.optim.warmup_steps = 2900
    c.optim.end_fraction = 1e-5 / 1.25e-3
    c.train.steps = 29000
    return c
