"""configs/pair.py with Llama-3.1-8B and Qwen2.5-7B: their own keys and values, a fourth of the positions.

    python run.py plan --config configs/pair_8b.py --target h100x1
    python run.py --config configs/pair_8b.py                                # GPU, HF_TOKEN for Llama

Both readers and the start fit one card of 80 GB (docs/messages.md).
"""

from ml_collections import ConfigDict

from configs import models, pair


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns pair.py with two larger readers."""
    c = pair.get_config(recipe)
    c.llms.llama = models.llama31_8b()
    c.llms.qwen = models.qwen25_7b()
    c.encoder.width = 2048
    c.encoder.texts = 400
    return c
