"""The command `generate`: continuations of prompts by a trained TTT language model."""

import argparse

import jax

from lw_jax.commands.loading import Loaded
from lw_jax.core import processes, runtime
from lw_jax.core.errors import UserError
from lw_jax.hub import sources
from lw_jax.inference import language_model


@processes.Together()
def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Prints each prompt with a continuation of at most --tokens tokens; --seed, else config.seed, seeds the sampling.

    The prompts are split over the devices, of all processes of a SLURM step.

    Raises:
      UserError: the run trained no language model, has no checkpoint yet, or a number is out of range.
    """
    if args.tokens < 1 or args.temperature < 0:
        flags = f"--tokens {args.tokens} --temperature {args.temperature:g}"
        raise UserError(f"{flags}: at least one token is needed, and a temperature of 0 or above")
    runtime.start()
    runtime.tell_device()
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    lm = language_model.load_trained(loaded.cfg, loaded.workdir, texts=len(args.prompt))
    seed = loaded.cfg.seed if args.seed is None else args.seed
    continuations = lm.generate(args.prompt, args.tokens, temperature=args.temperature, seed=seed)
    if jax.process_index():  # of several processes the first one prints
        return 0
    print(f"step {lm.step}")
    for prompt, text in zip(args.prompt, continuations, strict=True):
        print(f"--- {prompt}\n{prompt}{text}")
    return 0
