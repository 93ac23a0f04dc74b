"""StableLM-2-Zephyr-1.6B (Stability AI's non-commercial licence) on preference pairs, in 4 bits. See common.py."""

from ml_collections import ConfigDict

from configs import base
from configs.dpo import common


def get_config(variant: str = "dpo") -> ConfigDict:
    """Returns ours, or the seed project's values for "seed"."""
    llm = base.llm("stabilityai/stablelm-2-zephyr-1_6b", weights="nf4", template="chat")
    c = common.tuned(llm, rank=12, variant=variant)
    if variant == "seed":
        return common.seed(c, rate=2e-5, batch=18, warmup=50, every=250, max_length=768)
    return c
