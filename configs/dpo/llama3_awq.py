"""Llama-3-8B-Instruct as AutoAWQ has packed it (Llama 3 Community License) on preference pairs. See common.py."""

from ml_collections import ConfigDict

from configs import base
from configs.dpo import llama3


def get_config(variant: str = "dpo") -> ConfigDict:
    """Returns llama3.py with the packed folder, read as it is."""
    c = llama3.get_config(variant)
    c.llms.policy = base.llm("casperhansen/llama-3-8b-instruct-awq", weights="awq", template="chat")
    return c
