"""The command `generate`: continuations of prompts by a trained TTT language model."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from lw_jax.commands.loading import Loaded
from lw_jax.core import processes, runtime
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.hub import sources
from lw_jax.inference import language_model


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command with its flags."""
    sampling = {"tokens": args.tokens, "temperature": args.temperature}
    return main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir, prompts=tuple(args.prompt), **sampling)


@processes.Together()
def main(
    cfg: Config, *, resolved: dict[str, Any], workdir: Path, prompts: Sequence[str], tokens: int, temperature: float
) -> int:
    """Prints each prompt with a continuation of at most `tokens` tokens; config.seed seeds the sampling.

    The prompts are split over the devices, of all processes of a SLURM step.

    Raises:
      UserError: the run trained no language model, has no checkpoint yet, or a number is out of range.
    """
    del resolved
    if tokens < 1 or temperature < 0:
        given = f"--tokens {tokens} --temperature {temperature:g}"
        raise UserError(f"{given}: at least one token is needed, and a temperature of 0 or above")
    runtime.start()
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    runtime.tell_device()
    lm = language_model.load_trained(cfg, workdir, texts=len(prompts))
    continuations = lm.generate(prompts, tokens, temperature=temperature, seed=cfg.seed)
    if jax.process_index():  # of several processes the first one prints
        return 0
    print(f"step {lm.step}")
    for prompt, text in zip(prompts, continuations, strict=True):
        print(f"--- {prompt}\n{prompt}{text}")
    return 0
