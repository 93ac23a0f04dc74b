"""pairs.py with one reader: the wire that the other one joins in pairs_join.py.

python run.py --config configs/pairs_one.py
"""

from ml_collections import ConfigDict

from configs import pairs


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns pairs.py without its second reader."""
    c = pairs.get_config(recipe)
    c.llms = ConfigDict({"llama": c.llms.llama})
    return c
