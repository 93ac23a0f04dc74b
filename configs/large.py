"""Llama-3.1-8B and Qwen2.5-7B on whatever cards there are: placement, recomputation and micro-batch by the planner.

    python run.py --config configs/large.py
    python run.py plan --config configs/large.py --target a100_80x4

Both models and SQuAD come from the Hugging Face hub (HF_TOKEN for Llama). configs/h100x4.py is this one with the
planner's choice written down, so that a run starts without planning; the mathematics stays the same.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns the two-reader run."""
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
    c.compute.dtype = "bf16"
    return c
