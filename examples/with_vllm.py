"""Writes the request with which a vLLM server answers from a message, and sends it where a server is named.

    python examples/with_vllm.py --workdir runs/mine --reader llama --context notes.txt --question "Who wrote it?" \
        --out body.json --url http://localhost:8000

The server serves the reader's own model, MODEL, with `vllm serve MODEL --enable-prompt-embeds`. Two forms, after the
sources of vLLM 0.33.0; a tensor is base64 of what torch.save writes, f32 [t, d], and the server casts it to its dtype:

- `--api completions`: the field `prompt_embeds` of /v1/completions holds the whole prompt, question included. Every
  position is the one that the reader was trained with.
- `--api chat`: a content part {"type": "prompt_embeds", "data": ...} of /v1/chat/completions (vLLM PR #40720: since
  0.21.0) holds the message alone: slots and task vector. What stands around them is text, so one part serves
  any question. The server puts its chat template around. Every position is that of training where the reader was
  trained with llms.NAME.template=chat and the template leaves the words as they are; with template=plain only the
  part's are. Where they differ, a note on standard error says so.

The wire needs adapter.kind=embeddings: vLLM's API takes no keys and values. Words that begin with --config. replace
values of the wire's configuration. VLLM_API_KEY is sent as the bearer token where it is set.
"""

import argparse
import base64
import http.client
import io
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import numpy as np

import lw_jax
from examples import torch_needed
from lw_jax.core import schema
from lw_jax.core.command_line import take_assignments
from lw_jax.core.config import split_prompt
from lw_jax.core.errors import UserError, leave
from lw_jax.data import chat_templates
from lw_jax.data.tokens import Tokenizer
from lw_jax.evals import answers
from lw_jax.hub import wire_repository
from lw_jax.inference import message_io
from lw_jax.training import run_folder

if TYPE_CHECKING:
    from lw_jax.inference.trained_wire import TrainedWire

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SECONDS = 600.0  # for an answer: a server may have others to give first
REPLY_BYTES = 1 << 24
MARK, OTHER = "\ue000", "\ue001"  # private use: in no text and no template


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of completions
    message: _Message | None = None  # of chat completions


class _Reply(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class _Fault(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Fault


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the body to --out, sends it to --url and prints the answer."""
    assignments, words = take_assignments(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, help="a trained run, an exported wire, or owner/name of the hub")
    parser.add_argument("--reader", required=True, help="the wire's reader that the server serves")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--context", help="the text, a UTF-8 file; -: standard input")
    given.add_argument("--message", help="a message that `answer --write` wrote; -: standard input")
    parser.add_argument("--question", required=True)
    parser.add_argument("--api", choices=PATHS, default="completions")
    parser.add_argument("--out", type=Path, help="the body's file")
    parser.add_argument("--url", default="", help="the server, as http://localhost:8000")
    parser.add_argument("--model", default="", help="the server's name of the model; default: none, so its only one")
    args = parser.parse_args(words)
    if not args.out and not args.url:
        raise UserError("--out and --url are both missing: name a file for the body, a server, or both")
    if args.url and not args.url.startswith(("http://", "https://")):
        raise UserError(f"--url {args.url}: must begin with http:// or https://, as http://localhost:8000")
    if args.out:
        run_folder.check_writable(args.out.absolute().parent, remedy="choose another file for --out")
    text = message_io.read_text(args.context) if args.context else ""
    message = message_io.read_message(args.message) if args.message else b""
    wire = open_wire(args.workdir, assignments)
    message = message or wire.write(text)
    make = {"completions": make_completion, "chat": make_chat}[args.api]
    fields = make(wire, message, args.reader, args.question)
    body = json.dumps(fields | ({"model": args.model} if args.model else {})).encode()
    print(f"body: {len(body):,} bytes for {PATHS[args.api]}")
    if args.out:
        try:
            args.out.write_bytes(body)
        except OSError as error:
            raise UserError(f"--out {args.out}: {error.strerror}; name a file in a writable folder") from error
    if args.url:
        print(f"answer: {send(args.url, args.api, body)}")
    return 0


def open_wire(workdir: str, assignments: dict[str, str]) -> "TrainedWire":
    """Opens a trained wire. Raises UserError, before weights are loaded, where vLLM cannot take its messages."""
    from lw_jax.inference.trained_wire import TrainedWire

    torch_needed.check()
    path = wire_repository.locate(workdir)
    cfg = run_folder.read_config(path)
    if cfg.adapter.kind != "embeddings" or cfg.encoder.kind == "cache":
        raise UserError(
            f"{path}: config.adapter.kind={cfg.adapter.kind!r}, encoder.kind={cfg.encoder.kind!r}: vLLM's API takes "
            "input embeddings, no keys and values; train the wire with --config.adapter.kind=embeddings"
        )
    wire = lw_jax.load_wire(path, assignments)
    assert isinstance(wire, TrainedWire), "one of keys and values is refused above"
    return wire


def make_completion(wire: "TrainedWire", message: bytes, reader: str, question: str) -> dict[str, Any]:
    """Returns the body for /v1/completions, without the model's name."""
    whole = wire.prompt_embeds(message, reader, question)
    fields = {"prompt_embeds": pack(whole), "max_tokens": wire.recipe.cfg.eval.max_new_tokens}
    return fields | _greedy(wire.recipe.tokenizers[reader])


def make_chat(wire: "TrainedWire", message: bytes, reader: str, question: str) -> dict[str, Any]:
    """Returns the body for /v1/chat/completions, without the model's name.

    The text before the answer (prompt.anchor) begins the reply, which the server goes on with. Prints a note where the
    server, with the reader's own chat template, will read other tokens around the message than in training.
    """
    recipe, (before, part, after) = wire.recipe, cut_prompt(wire, message, reader, question)
    prompt, tokenizer, template = recipe.cfg.prompt, recipe.tokenizers[reader], recipe.cfg.llms[reader].template
    if not tokenizer.backend.chat_template:
        raise UserError(f"reader {reader!r}: its tokenizer has no chat template: vLLM refuses; use --api completions")
    parts, joint = split_prompt(prompt.user), find_joint(tokenizer)
    assert parts is not None, "the recipe has checked it"
    first, last = parts[0].removesuffix(joint), (parts[1] + question.strip() + parts[2]).removeprefix(joint)
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    reply = [{"role": "assistant", "content": prompt.anchor}] if prompt.anchor else []

    def ask(content: Any) -> list[dict[str, Any]]:
        return [*system, {"role": "user", "content": content}, *reply]

    flat = joint.join(text for text in (first, MARK, last) if text)
    if read_around(tokenizer, ask(flat), prompt.anchor) != (before, after):
        print(
            f"note: around the message reader {reader!r} will read other tokens than in training (llms.{reader}."
            f"template={template}); --api completions sends those of training",
            file=sys.stderr,
        )
    texts = [{"type": "text", "text": text} for text in (first, last)]
    content = [texts[0], {"type": "prompt_embeds", "data": pack(part)}, texts[1]]
    content = [one for one in content if one.get("text") != ""]  # the server drops these and their line breaks
    fields = {"messages": ask(content)} | _greedy(tokenizer)
    fields |= {"max_completion_tokens": recipe.cfg.eval.max_new_tokens}
    fields |= {"chat_template_kwargs": {"date_string": f"{chat_templates.DATE:%d %b %Y}"}}  # as in training
    return fields | ({"add_generation_prompt": False, "continue_final_message": True} if reply else {})


def cut_prompt(
    wire: "TrainedWire", message: bytes, reader: str, question: str
) -> tuple[list[int], np.ndarray, list[int]]:
    """Returns a prompt's token ids before the message, the message's positions f32 [n d], and the ids behind it."""
    from lw_jax.data import batches  # JAX, which `lw_jax.load_wire` prepares for

    whole = wire.prompt_embeds(message, reader, question)
    fields = batches.encode_prompt("?", question, layout=wire.recipe.layout)["readers"][reader]
    before, after = (fields[name]["ids"][fields[name]["mask"]].tolist() for name in ("before", "after"))
    return before, whole[len(before) : len(whole) - len(after)], after


def read_around(tokenizer: Tokenizer, turns: list[dict[str, Any]], anchor: str) -> tuple[list[int], list[int]]:
    """Returns the ids before and behind MARK in a conversation, up to where the server's reply begins."""
    left, _, right = tokenizer.render(turns, reply=not anchor).partition(MARK)
    if anchor:  # the server leaves out what the template puts after it
        right = right[: right.rfind(anchor) + len(anchor)]
    return tokenizer.encode(left), tokenizer.encode(right)


def find_joint(tokenizer: Tokenizer) -> str:
    """Returns what vLLM puts between a message's parts: nothing if the chat template takes parts, else a line break."""
    parts = [{"type": "text", "text": MARK}, {"type": "text", "text": OTHER}]
    try:
        return "" if MARK + OTHER in tokenizer.render([{"role": "user", "content": parts}], reply=True) else "\n"
    except UserError:  # it adds the content to a text, which a list does not allow
        return "\n"


def pack(embeddings: np.ndarray) -> str:
    """Returns embeddings f32 [t d] as vLLM takes a tensor: base64 of what torch.save writes."""
    import torch

    file = io.BytesIO()
    torch.save(torch.from_numpy(np.ascontiguousarray(embeddings)), file)
    return base64.b64encode(file.getvalue()).decode()


def send(url: str, api: str, body: bytes) -> str:
    """Returns the first line of a server's answer to a body. Raises UserError with the server's own words."""
    where = url.rstrip("/").removesuffix("/v1") + PATHS[api]
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    try:
        with urllib.request.urlopen(urllib.request.Request(where, body, headers), timeout=SECONDS) as reply:
            data = reply.read(REPLY_BYTES)
    except urllib.error.HTTPError as error:
        raise UserError(f"{where}: HTTP {error.code}: {_find_reason(error.read(REPLY_BYTES))}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{where}: {reason}; is `vllm serve MODEL --enable-prompt-embeds` running there?") from error
    remedy = "name the base URL of a vLLM server"
    choice = schema.decode(data, _Reply, where=where, remedy=remedy).choices[0]
    said = choice.message.content if choice.message else choice.text
    if said is None:
        raise UserError(f"{where}: the reply has no text; {remedy}")
    return answers.first_line(said)


def _greedy(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields with which the server decodes as `wire.read` does: the likeliest token, until a stop."""
    # A field that is left out is the model's own of generation_config.json, which may penalise repeated words.
    return {"temperature": 0.0, "repetition_penalty": 1.0, "stop_token_ids": list(tokenizer.stops)}


def _find_reason(data: bytes) -> str:
    """Returns the message of vLLM's error body; of another server's, the body."""
    try:
        return schema.decode(data, _Refusal, where="", remedy="").error.message
    except UserError:
        return data.decode("utf-8", "replace")


if __name__ == "__main__":
    leave(main)
