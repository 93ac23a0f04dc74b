"""The whole path with two tiny readers that the project makes itself: no download, no GPU.

    python run.py --config configs/smoke.py

Hardware: any CPU. Not measured.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns base.py with selfmade readers and a byte encoder from scratch."""
    c = base.get_config(recipe)
    c.llms.llama = models.selfmade("llama")
    c.llms.qwen = models.selfmade("qwen")
    c.encoder.kind = "bytes"
    c.encoder.layers = 2
    c.encoder.width = 64
    c.encoder.slots = 16
    c.encoder.window = 256
    c.adapter.hidden = 256
    c.data.facts = 2
    c.train.steps = 300
    return c
