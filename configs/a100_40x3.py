"""large.py on three A100 (40 GB): Llama over two, Qwen on the third.

    python run.py --config configs/a100_40x3.py

Planned, not measured: 3.2 h for 2000 steps, 26.3 of 42.3 GB at the peak. By
`python run.py plan --config configs/large.py --target a100_40x3` (22.0 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "hybrid3"
    c.train.micro_batch = 16
    c.compute.remat = "none"
    return c
