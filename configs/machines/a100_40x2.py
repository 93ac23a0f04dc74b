"""large.py on two A100 (40 GB): the readers' weights over both, gathered layer by layer.

    python run.py --config configs/machines/a100_40x2.py

Planned, not measured: 2.5 h for 2000 steps, 31.6 of 42.3 GB at the peak. By
`python run.py plan --config configs/large.py --target a100_40x2` (28.6 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "fsdp"
    c.mesh.data = 2
    c.train.micro_batch = 64
    c.compute.remat = "full"
    return c
