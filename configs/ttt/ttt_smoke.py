"""A small TTT-Linear model of bytes on Python's own documentation strings: any machine, no download, about a minute.

python run.py --config configs/ttt/ttt_smoke.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(recipe: str = "ttt") -> ConfigDict:
    """Returns a run of 200 steps that 2 CPU cores finish in about a minute."""
    c = base.get_config(recipe)
    c.ttt.layers = 2
    c.ttt.width = 64
    c.ttt.heads = 4
    c.ttt.ffn = 176
    c.data.train = "docstrings"
    c.optim.learning_rate = 3e-3
    c.optim.warmup_steps = 20
    c.optim.b2 = 0.95
    c.optim.weight_decay = 0.1
    c.train.steps = 200
    c.train.global_batch = 32
    c.train.eval_every = 50
    c.train.checkpoint_every = 100
    c.eval.examples = 64
    c.eval.batch = 32
    return c
