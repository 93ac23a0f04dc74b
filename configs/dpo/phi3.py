"""Phi-3-mini-4k-instruct (MIT), 3.8B, on preference pairs; its matrices in 4 bits. See common.py."""

from ml_collections import ConfigDict

from configs import base
from configs.dpo import common


def get_config(variant: str = "dpo") -> ConfigDict:
    """Returns ours, or the seed project's values for "seed"."""
    llm = base.llm("microsoft/Phi-3-mini-4k-instruct", weights="nf4", template="chat")
    c = common.tuned(llm, rank=12, variant=variant)
    if variant == "seed":
        return common.seed(c, rate=5e-6, batch=8, warmup=75, every=300, max_length=1024)
    return c
