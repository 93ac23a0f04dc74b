"""h100x1.py on two H100: readers whole on each GPU, the batch over both.

    python run.py --config configs/h100x2.py

Hardware: 2 x H100 (80 GB). Not measured.
"""

from ml_collections import ConfigDict

from configs import h100x1


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns h100x1.py with another mesh."""
    c = h100x1.get_config(recipe)
    c.mesh.placement = "replicate"
    c.mesh.data = 2
    return c
