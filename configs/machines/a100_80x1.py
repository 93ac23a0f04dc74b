"""large.py on one A100 (80 GB): both readers whole on it.

    python run.py --config configs/machines/a100_80x1.py

Planned, not measured: 3.8 h for 2000 steps, 58.9 of 85.1 GB at the peak. By
`python run.py plan --config configs/large.py --target a100_80x1` (18.5 samples/s).
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
