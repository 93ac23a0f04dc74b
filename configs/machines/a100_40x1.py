"""large.py on one A100 (40 GB) with Llama alone: both readers and what learns take 35.9 GB before any activation.

    python run.py --config configs/machines/a100_40x1.py

Planned, not measured: 2.9 h for 2000 steps, 33.1 of 42.3 GB at the peak. By
`python run.py plan --config configs/machines/a100_40x1.py` (24.7 samples/s); `configs/large.py` is refused there.
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with one reader and the planner's choice for this machine."""
    c = large.get_config(recipe)
    del c.llms.qwen
    c.mesh.placement = "single"
    c.train.micro_batch = 16
    c.compute.remat = "none"
    return c
