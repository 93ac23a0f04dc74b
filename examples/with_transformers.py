"""A wire's message read by the same model in transformers, beside our own answers.

    python examples/with_transformers.py --workdir runs/smoke-latentwire --reader qwen --context notes.txt \
        --question "Where does Mara Ellis live?"

--workdir is a run's folder, an exported wire or a repository owner/name of the hub. The reader is opened from the files
that the wire itself reads, a folder or a .gguf file, by AutoModelForCausalLM; self-made readers are folders too. Both
sides generate greedily, torch on the CPU. A reader with weights fp32 is computed in fp32 by both, and the command ends
with code 1 where an answer differs; one with bf16 by each in its own way, where roundings may differ. Needs torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import torch_needed
from lw_jax.core import environment
from lw_jax.core.command_line import take_assignments
from lw_jax.core.errors import UserError, leave
from lw_jax.core.precision import DTYPES, bf16_instructions
from lw_jax.hub import wire_repository
from lw_jax.inference import message_io
from lw_jax.training import run_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lw_jax.inference.answering import KVPrompt
    from lw_jax.inference.coded_wire import CodedWire
    from lw_jax.inference.trained_wire import TrainedWire

    Wire = TrainedWire | CodedWire

Model = Any  # a causal language model of transformers


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both answers to each question; returns 1 where they differ of a reader in fp32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--reader", required=True, help="its name in the wire's config.llms")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--context", help="a UTF-8 text file, or - for standard input")
    given.add_argument("--message", help="a file that `answer --write` wrote, or - for standard input")
    parser.add_argument("--question", action="append", required=True, help="may be given several times")
    assignments, words = take_assignments(argv)
    args = parser.parse_args(words)
    torch_needed.check()
    text = message_io.read_text(args.context) if args.context else ""
    message = message_io.read_message(args.message) if args.message else b""
    environment.hide_idle_cuda()  # before anything imports JAX
    _keep_fp32()
    wire = open_wire(args.workdir, args.reader, assignments)
    model, tokenizer = load_model(wire, args.reader)
    message = message or write(wire, text)
    ours = wire.read(message, args.reader, args.question)
    theirs = answer_with_transformers(model, tokenizer, wire, message, args.reader, args.question)
    print(f"message: {len(message)} bytes; {args.reader} is {model.name_or_path}")
    for question, own, other in zip(args.question, ours, theirs, strict=True):
        print(f"question: {question}\n  lw_jax:       {own}\n  transformers: {other}")
    equal = sum(own == other for own, other in zip(ours, theirs, strict=True))
    exact = wire.recipe.cfg.llms[args.reader].weights == "fp32"
    print(f"{equal} of {len(ours)} answers are equal{'' if exact else '; in bf16 roundings may differ'}")
    return int(exact and equal < len(ours))


def open_wire(workdir: str, reader: str, assignments: dict[str, str]) -> "Wire":
    """Opens a wire that has this reader; `assignments` by dotted key, as `load_wire` takes them."""
    import lw_jax

    path = wire_repository.locate(workdir)
    llms = run_folder.read_config(path).llms
    if reader not in llms:
        raise UserError(f"--reader {reader}: this wire has {', '.join(llms)}")
    weights = assignments.get(f"llms.{reader}.weights", llms[reader].weights)
    if weights not in DTYPES:
        raise UserError(
            f"--reader {reader}: its weights are packed ({weights}), and transformers would read others; "
            "name a reader with weights fp32 or bf16"
        )
    return lw_jax.load_wire(path, config=assignments)


def write(wire: "Wire", text: str) -> bytes:
    """Returns a text's message; of encoder.kind='cache' with all positions, as a cache of transformers holds them."""
    from lw_jax.inference.trained_wire import TrainedWire

    return wire.write(text) if isinstance(wire, TrainedWire) else wire.write(text, ratio=1)


def _keep_fp32() -> None:
    """Turns off the bf16 products that compute.dtype=auto takes on a CPU made for them, before JAX starts."""
    if bf16_instructions():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX512".strip()


def load_model(wire: "Wire", reader: str) -> "tuple[Model, PreTrainedTokenizerBase]":
    """Opens a wire's reader in transformers, on the CPU, from the files and in the dtype that the wire reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from lw_jax.recipes import frozen_models

    cfg, llm = wire.recipe.cfg, wire.recipe.cfg.llms[reader]
    location, dtype = frozen_models.locate(cfg, llm.source, llm.sha256), getattr(torch, DTYPES[llm.weights])
    folder, file = (location, None) if location.is_dir() else (location.parent, location.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype).eval()
    model.generation_config = GenerationConfig()  # the folder's own may sample or punish repeated words
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def answer_with_transformers(
    model: Model,
    tokenizer: "PreTrainedTokenizerBase",
    wire: "Wire",
    message: bytes | list[bytes],
    reader: str,
    questions: list[str],
) -> list[str]:
    """Returns what transformers answers from a message, or from a message for each question; as `read` of the wire."""
    from lw_jax.evals.answers import first_line

    found = generate(model, wire, message, reader, questions)
    # Nothing tidied, as our own tokenizers decode.
    texts = (tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in found)
    return [first_line(str(text)) for text in texts]


def generate(
    model: Model, wire: "Wire", message: bytes | list[bytes], reader: str, questions: list[str]
) -> list[list[int]]:
    """Returns the likeliest ids of each answer, without the stop.

    Raises UserError for an answer within which a LongRope model's frequencies change: we then read the whole text
    again, and transformers keeps what it has read.
    """
    from lw_jax.models.rotary import LongRope

    known, most = wire.recipe.wire.readers[reader], wire.recipe.cfg.eval.max_new_tokens
    scaling, found = known.config.rope_scaling, []
    for prompt in (wire.prefix_kv if known.kind == "kv" else cast(Any, wire).prompt_embeds)(message, reader, questions):
        inputs = to_inputs(model, prompt)
        length = inputs["attention_mask"].shape[1]
        if isinstance(scaling, LongRope) and length <= scaling.original_max_positions < length + most:
            raise UserError(
                f"reader {reader!r}: a prompt of {length} positions and {most} new tokens; transformers cannot pass "
                f"{scaling.original_max_positions}, where the model's frequencies change: ask a shorter question"
            )
        settings = {"do_sample": False, "max_new_tokens": most, "eos_token_id": list(known.stops)}
        ids = model.generate(**inputs, **settings, pad_token_id=known.stops[0])[0].tolist()
        found.append(ids[:-1] if ids[-1] in known.stops else ids)
    return found


def to_inputs(model: Model, prompt: "np.ndarray | KVPrompt") -> dict[str, Any]:
    """Returns a prompt of `prompt_embeds` or `prefix_kv` as arguments of a model's `generate`."""
    import torch
    from transformers import DynamicCache

    if isinstance(prompt, np.ndarray):
        x, held = prompt, {}
    else:
        cache = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(torch.tensor(prompt.keys_values, device=model.device)):
            cache.update(keys.to(model.dtype), values.to(model.dtype), layer)
        # `generate` counts the cache's positions among those of the embeddings and leaves out as many.
        x = np.pad(prompt.embeddings, ((cache.get_seq_length(), 0), (0, 0)))
        held = {"cache": cache}
    embeddings = torch.tensor(x[None], device=model.device, dtype=model.dtype)
    return {"inputs_embeds": embeddings, "attention_mask": torch.ones(embeddings.shape[:2], dtype=torch.long), **held}


if __name__ == "__main__":
    leave(main)
