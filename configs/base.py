"""Defaults of every key as a ConfigDict; `python run.py show --keys` lists them with units, ranges and reasons.

A configuration file calls `get_config` and changes a few values; flags change single ones
(`--config.optim.learning_rate=3e-4`). The keys are declared in lw_jax/core/config_sections.py.
"""

import dataclasses

from ml_collections import ConfigDict

from lw_jax.core import config


def llm(source: str, *, sha256: str = "", weights: str = "fp32", template: str = "plain") -> ConfigDict:
    """Returns the keys of one frozen reader."""
    return ConfigDict(dataclasses.asdict(config.LLM(source, sha256, weights, template)))


def keys_and_values(c: ConfigDict) -> None:
    """Sets a frozen body with LoRA pairs as encoder, and latents that begin as the rarest tokens' keys and values.

    The run sets how many: encoder.states, encoder.width and encoder.slots.
    """
    c.encoder.pooling = "rare"
    c.encoder.mask = "causal"
    c.encoder.rank = 8
    c.encoder.rate = 1.0
    c.adapter.kind = "kv"
    c.adapter.start = "aligned"
    c.adapter.hidden = 256


def cache(c: ConfigDict) -> None:
    """Sets messages that are their readers' own keys and values, a fourth of the positions; nothing is trained.

    `train.steps` above 0 trains their bases from there, at a small learning rate.
    """
    c.encoder.kind = "cache"
    c.update_from_flattened_dict(config.unread(config.build(c)))  # of trained latents
    c.encoder.ratio = 4
    c.train.steps = 0
    c.train.global_batch = 8
    c.optim.learning_rate = 1e-5
    c.stages.pretrain.reconstruct = 1.0
    c.eval.rows = ("text", "none", "latents", "shuffled", "all", "half", "eighth", "swapped", "swapped_text")


def get_config(recipe: str = "latentwire") -> ConfigDict:
    """Returns the defaults; `recipe` is the word after the colon in `--config file.py:recipe`."""
    return ConfigDict(config.defaults(recipe))
