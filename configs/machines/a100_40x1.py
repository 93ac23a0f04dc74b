"""large.py on one A100 (40 GB) with Llama alone: both readers and the trained parts need 35.9 GB before activations.

    python run.py --config configs/machines/a100_40x1.py
    python run.py plan --config configs/machines/a100_40x1.py      # placement, micro-batch, memory and hours

The planner chooses the placement at the start, as for `configs/large.py` on any other machine.
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with one reader."""
    c = large.get_config(recipe)
    del c.llms.qwen
    return c
