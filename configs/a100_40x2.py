"""large.py on two A100 (40 GB): one reader on each.

    python run.py --config configs/a100_40x2.py

Planned, not measured: 3.7 h for 2000 steps, 31.6 of 42.3 GB at the peak. By
`python run.py plan --config configs/large.py --target a100_40x2` (19.4 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "split"
    c.train.micro_batch = 8
    c.compute.remat = "none"
    return c
