"""TinyLlama-1.1B-Chat (Apache-2.0) on preference pairs; its matrices in 4 bits. See common.py."""

from ml_collections import ConfigDict

from configs import base
from configs.dpo import common


def get_config(variant: str = "dpo") -> ConfigDict:
    """Returns ours, or the seed project's values for "seed"."""
    llm = base.llm("TinyLlama/TinyLlama-1.1B-Chat-v1.0", weights="nf4", template="chat")
    c = common.tuned(llm, rank=8, variant=variant)
    if variant == "seed":
        return common.seed(c, rate=2e-5, batch=16, warmup=50, every=200, max_length=512)
    return c
