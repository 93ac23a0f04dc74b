"""large.py on two nodes of eight H100 (80 GB): both readers whole on every GPU, the batch over all of them.

    python run.py --config configs/machines/h100x16.py

`python run.py slurm --config configs/machines/h100x16.py` writes the job that starts a process on each node. Planned,
not measured: 8 minutes for 2000 steps, 43.8 of 84.9 GB at the peak. By
`python run.py plan --config configs/large.py --target 2xh100x8` (549.3 samples/s).
"""

from ml_collections import ConfigDict

from configs import large


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns large.py with the planner's choice for this machine."""
    c = large.get_config(recipe)
    c.mesh.placement = "replicate"
    c.mesh.data = 16
    c.train.micro_batch = 8
    c.compute.remat = "none"
    return c
