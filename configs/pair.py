"""A text's message is its readers' own keys and values: nothing is trained; two readers of two families.

    python run.py --config configs/pair.py                                    # SQuAD from the hub
    python run.py --config configs/pair.py --config.data.train=FILE --config.data.validation=OTHER

SmolLM2-135M and Qwen2.5-Coder-1.5B, a fourth of the positions, 256 bytes a token of the text: a cache message
(docs/messages.md). Latents that are trained on real text: configs/squad.py.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns base.py with two readers whose messages are their own keys and values."""
    c = base.get_config(recipe)
    c.llms.llama = models.smollm2_135m()
    c.llms.llama.weights = "bf16"
    c.llms.qwen = models.qwen25_coder_1_5b()
    c.llms.qwen.weights = "bf16"
    base.cache(c)
    c.encoder.width = 1216
    c.encoder.texts = 160
    c.prompt.system = "Answer with a few words from the text."
    c.prompt.anchor = ""
    c.data.train = "hub:rajpurkar/squad"
    c.data.validation = "hub:rajpurkar/squad"
    c.data.context_tokens = 640
    c.data.overlong = "drop"
    c.eval.examples = 256
    return c
