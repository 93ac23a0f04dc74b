"""configs/pair.py with two tiny readers that the project makes itself: no download, no GPU, a minute on two cores.

python run.py --config configs/cache_smoke.py
"""

from ml_collections import ConfigDict

from configs import base, smoke


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns smoke.py's readers, whose messages are their own keys and values."""
    c = smoke.get_config(recipe)
    base.cache(c)
    c.encoder.width = 256
    c.encoder.texts = 128
    c.message.bytes = 64
    c.data.context_tokens = 256
    return c
