"""The verb `generate`: what a trained language model goes on with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lw_jax.core import runtime
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.hub import sources
from lw_jax.inference import language_model


def main(
    cfg: Config, *, resolved: dict[str, Any], workdir: Path, prompts: Sequence[str], tokens: int, temperature: float
) -> int:
    """Prints each prompt with at most so many tokens more; config.seed decides what is drawn, at temperature 0 nothing.

    Raises:
      UserError: the run trained no language model, has no checkpoint yet, or a number is out of range.
    """
    del resolved
    if tokens < 1 or temperature < 0:
        told = f"--tokens {tokens} --temperature {temperature:g}"
        raise UserError(f"{told}: at least one token is needed, and a temperature of 0 or above")
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    lm = language_model.load_trained(cfg, workdir)
    said = lm.generate(prompts, tokens, temperature=temperature, seed=cfg.seed)
    print(f"step {lm.step}")
    for prompt, text in zip(prompts, said, strict=True):
        print(f"--- {prompt}\n{prompt}{text}")
    return 0
