"""large.py on one H100 (80 GB): both readers whole on it.

    python run.py --config configs/machines/h100x1.py

Planned, not measured: 1.6 h for 2000 steps, 58.9 of 84.9 GB at the peak. By
`python run.py plan --config configs/large.py --target h100x1` (45.3 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "single"
    c.train.micro_batch = 32
    c.compute.remat = "none"
    return c
