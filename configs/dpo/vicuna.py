"""Vicuna-7B-v1.5 (Llama 2 Community License) on preference pairs; its matrices in 4 bits. See common.py.

Its repository has pickles, which are never opened: docs/dpo.md says how it is converted.
It has no chat template: rows must hold the prompt as the model is to read it ("USER: ... ASSISTANT:").
"""

from ml_collections import ConfigDict

from configs import base
from configs.dpo import common


def get_config(variant: str = "dpo") -> ConfigDict:
    """Returns ours, or the seed project's values for "seed"."""
    llm = base.llm("lmsys/vicuna-7b-v1.5", weights="nf4", template="plain")
    c = common.tuned(llm, rank=16, variant=variant)
    if variant == "seed":
        return common.seed(c, rate=1e-6, batch=16, warmup=100, every=500, max_length=1024)
    return c
