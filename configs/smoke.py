"""The whole path with two tiny readers that the project makes itself: no download, no GPU, minutes on two CPU cores.

    python run.py --config configs/smoke.py

Hardware: any CPU. Times and table: docs/numbers.md.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns base.py with two self-made readers, one of which lends the encoder its body."""
    c = base.get_config(recipe)
    c.llms.llama = models.selfmade("llama")
    c.llms.qwen = models.selfmade("qwen")
    c.encoder.source = "selfmade:llama"
    c.encoder.width = 64
    c.encoder.slots = 8
    c.encoder.window = 256
    c.adapter.hidden = 256
    c.adapter.start = "aligned"
    c.data.facts = 1
    c.optim.kind = "muon"
    c.optim.learning_rate = 1e-2
    c.optim.warmup_steps = 10
    c.train.steps = 150
    c.train.eval_every = 50
    c.selfmade.steps = 120
    return c
