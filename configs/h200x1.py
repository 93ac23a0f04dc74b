"""large.py on one H200 (141 GB): both readers whole on it.

    python run.py --config configs/h200x1.py

Planned, not measured: 1.7 h for 2000 steps, 94.6 of 151.4 GB at the peak. By
`python run.py plan --config configs/large.py --target h200x1` (42.9 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "single"
    c.train.micro_batch = 64
    c.compute.remat = "none"
    return c
