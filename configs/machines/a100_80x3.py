"""large.py on two of three A100 (80 GB): both readers whole on each; three do not divide the batch of 128.

    python run.py --config configs/machines/a100_80x3.py

Planned, not measured: 1.9 h for 2000 steps, 58.8 of 85.1 GB at the peak. By
`python run.py plan --config configs/large.py --target a100_80x3` (36.9 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "replicate"
    c.mesh.data = 2
    c.train.micro_batch = 32
    c.compute.remat = "none"
    return c
