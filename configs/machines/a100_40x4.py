"""large.py on four A100 (40 GB): the readers' weights over all GPUs, gathered layer by layer.

    python run.py --config configs/machines/a100_40x4.py

Planned, not measured: 1.3 h for 2000 steps, 30.8 of 42.3 GB at the peak. By
`python run.py plan --config configs/large.py --target a100_40x4` (55.3 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "fsdp"
    c.mesh.data = 4
    c.train.micro_batch = 16
    c.compute.remat = "none"
    return c
