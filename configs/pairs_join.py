"""A reader joins a wire that never saw it: the encoder of another run as it is, one new adapter.

    python run.py --config configs/pairs_one.py
    python run.py --config configs/pairs_join.py        # or --config.encoder.run=FOLDER of any run with this encoder
    python run.py eval --workdir runs/pairs_join-latentwire

Messages of the first run are read by this one.
"""

from ml_collections import ConfigDict

from configs import pairs


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns pairs.py with the second reader alone and the encoder of pairs_one.py's run."""
    c = pairs.get_config(recipe)
    c.llms = ConfigDict({"qwen": c.llms.qwen})
    c.encoder.run = "runs/pairs_one-latentwire"
    return c
