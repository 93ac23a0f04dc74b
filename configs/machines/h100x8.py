"""large.py on eight H100 (80 GB): both readers whole on every GPU, the batch over all of them.

    python run.py --config configs/machines/h100x8.py

Planned, not measured: 13 minutes for 2000 steps, 51.7 of 84.9 GB at the peak. By
`python run.py plan --config configs/large.py --target h100x8` (326.5 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "replicate"
    c.mesh.data = 8
    c.train.micro_batch = 16
    c.compute.remat = "none"
    return c
