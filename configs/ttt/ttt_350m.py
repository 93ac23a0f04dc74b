"""TTT-Linear of 355,986,176 parameters (GPT-2's 50,257 tokens): ttt_125m.py at the authors' next size, 7 B tokens.

python run.py --config configs/ttt/ttt_350m.py
"""

from ml_collections import ConfigDict

from configs.ttt import ttt_125m


def get_config(recipe: str = "ttt") -> ConfigDict:
    """Returns the authors' recipe for this size."""
    c = ttt_125m.get_config(recipe)
    c.ttt.layers = 24
    c.ttt.width = 1024
    c.ttt.heads = 16
    c.ttt.ffn = 2736
    c.optim.learning_rate = 1.5e-3
    c.optim.warmup_steps = 1350
    c.optim.end_fraction = 1e-5 / 1.5e-3
    c.train.steps = 13500
    return c
