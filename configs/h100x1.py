"""Llama-3.1-8B and Qwen2.5-7B on one H100 (80 GB): both readers in bf16, whole on the GPU.

    python run.py --config configs/h100x1.py

Hardware: 1 x H100. Not measured. Both models and SQuAD come from the Hugging Face hub (HF_TOKEN for Llama).
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns the two-reader run that the other h100 files place on more GPUs; the mathematics stays the same."""
    c = base.get_config(recipe)
    c.llms.llama = models.llama31_8b()
    c.llms.qwen = models.qwen25_7b()
    c.encoder.source = "HuggingFaceTB/SmolLM2-360M"  # Apache-2.0
    c.adapter.start = "aligned"
    c.prompt.anchor = ""  # the chat template's own opening of the answer
    c.data.train = "hub:rajpurkar/squad"
    c.data.validation = "hub:rajpurkar/squad"
    c.data.overlong = "drop"
    c.train.steps = 2000
    c.train.global_batch = 128
    c.train.micro_batch = 16
    c.compute.dtype = "bf16"
    c.compute.remat = "full"
    return c
