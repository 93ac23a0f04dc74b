"""large.py on four H100 (80 GB): both readers whole on every GPU, the batch over all of them.

    python run.py --config configs/h100x4.py

Planned, not measured: 24 minutes for 2000 steps, 57.4 of 84.9 GB at the peak (179.7 samples/s). Made by
`python run.py plan --config configs/large.py --target h100x4`, whose line "as flags" has these values; with them a run
starts without planning. On every other machine: `python run.py --config configs/large.py`, which plans at its start.
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
