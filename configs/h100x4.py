"""h100x1.py on four H100: readers split over pairs of GPUs, the batch over both pairs.

    python run.py --config configs/h100x4.py

Hardware: 4 x H100 (80 GB). Not measured.
"""

from ml_collections import ConfigDict

from configs import h100x1


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns h100x1.py with another mesh."""
    c = h100x1.get_config(recipe)
    c.mesh.placement = "tensor"
    c.mesh.model = 2
    return c
