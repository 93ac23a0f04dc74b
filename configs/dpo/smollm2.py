"""SmolLM2-135M-Instruct (Apache-2.0; a package of PyPI, no hub needed) on preference pairs, on a CPU or any card."""

from ml_collections import ConfigDict

from configs import models
from configs.dpo import common


def get_config(variant: str = "dpo") -> ConfigDict:
    """Returns common.py's values with the small model in 4 bits."""
    if variant == "seed":
        raise ValueError("the original project has no SmolLM2; its models: tinyllama, stablelm, phi3, vicuna, llama3")
    llm = models.smollm2_135m()
    llm.weights = "nf4"
    c = common.tuned(llm, rank=8, variant=variant)
    c.compute.dtype = "fp32"
    c.dpo.max_length = 256
    return c
