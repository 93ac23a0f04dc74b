"""large.py on one H200 (141 GB): both readers whole on it.

    python run.py --config configs/machines/h200x1.py

Planned, not measured: 1.3 h for 2000 steps, 118.7 of 151.4 GB at the peak. By
`python run.py plan --config configs/large.py --target h200x1` (53.4 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "single"
    c.train.micro_batch = 128
    c.compute.remat = "none"
    return c
