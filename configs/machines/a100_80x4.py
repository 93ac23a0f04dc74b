"""large.py on four A100 (80 GB): both readers whole on every GPU, the batch over all of them.

    python run.py --config configs/machines/a100_80x4.py

Planned, not measured: 58 minutes for 2000 steps, 57.3 of 85.1 GB at the peak. By
`python run.py plan --config configs/large.py --target a100_80x4` (73.9 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "replicate"
    c.mesh.data = 4
    c.train.micro_batch = 32
    c.compute.remat = "none"
    return c
