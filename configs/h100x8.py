"""h100x1.py on eight H100: readers split over four GPUs, the batch over both halves.

    python run.py --config configs/h100x8.py

Hardware: 8 x H100 (80 GB). Not measured.
"""

from ml_collections import ConfigDict

from configs import h100x1


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns h100x1.py with another mesh."""
    c = h100x1.get_config(recipe)
    c.mesh.placement = "tensor"
    c.mesh.model = 4  # divides 8 and 4 key-value heads (Llama-3.1-8B, Qwen2.5-7B); 8 does not
    return c
