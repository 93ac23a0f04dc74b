"""The command `answer`: encode a text or read a message, and print every reader's answers."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lw_jax.commands.loading import Loaded
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase
from lw_jax.inference import message_io
from lw_jax.training.run_folder import check_writable

if TYPE_CHECKING:
    from lw_jax.inference.coded_wire import CodedWire
    from lw_jax.inference.trained_wire import TrainedWire


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command with its flags; reads texts and messages before JAX is imported."""
    request = message_io.Request(
        context=message_io.read_text(args.context) if args.context else "",
        message=message_io.read_message(args.message) if args.message else b"",
        questions=tuple(args.question or ()),
        write=args.write or "",
        bits=args.bits,
        slots=args.slots,
        width=args.width,
        ratio=args.ratio,
    )
    return main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir, request=request)


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path, request: message_io.Request) -> int:
    """Prints the message's size and the answers, for a text also the answers from the text itself.

    With `request.write` the message is written; standard output then holds it alone, and the rest goes to stderr.
    """
    del resolved
    from lw_jax.core import runtime
    from lw_jax.inference import answering, trained_wire
    from lw_jax.inference.coded_wire import CodedWire

    # Bad channels and messages are refused before any weight is loaded.
    _check_message(cfg, request)
    answering.check_questions(request.questions, name="--question")
    if request.write not in ("", "-"):
        check_writable(Path(request.write).absolute().parent, remedy="choose another file for --write")
    runtime.tell_device()
    with contextlib.redirect_stdout(sys.stderr if request.write == "-" else sys.stdout):
        wire = trained_wire.open_wire(cfg, workdir)
        with phase("writing the message, which first compiles"):
            message = request.message or _encode(wire, request)
        if request.message and isinstance(wire, CodedWire):
            wire = wire.at(request.ratio)
        if request.write not in ("", "-"):
            message_io.write_message(message, request.write)
        _print_answers(wire, message, request)
    if request.write == "-":
        message_io.write_message(message, request.write)
    return 0


def _check_message(cfg: Config, request: message_io.Request) -> None:
    """Refuses a message of another kind, and sizes that this kind of message does not have."""
    from lw_jax.inference import coded_wire, trained_wire
    from lw_jax.models import cache_codec, codec

    cache = cfg.encoder.kind == "cache"
    for name in ("bits", "slots", "width") if cache else ("ratio",):
        if (value := getattr(request, name)) is not None:
            rule = "a message of this wire has no such size (config.encoder.kind)"
            raise UserError(f"--{name} {value}: {rule}; {'--ratio sets its positions' if cache else 'leave it out'}")
    if request.message:
        (cache_codec if cache else codec).read_frame(request.message)
    if cache:
        coded_wire.check_ratio(cfg.encoder.ratio if request.ratio is None else request.ratio, name="--ratio")
    elif not request.message:
        bits = 8 if request.bits is None else request.bits
        trained_wire.resolve_channel(cfg.encoder, bits=bits, slots=request.slots, width=request.width)


def _encode(wire: "TrainedWire | CodedWire", request: message_io.Request) -> bytes:
    from lw_jax.inference.coded_wire import CodedWire

    if isinstance(wire, CodedWire):
        return wire.write(request.context, ratio=request.ratio)
    bits = 8 if request.bits is None else request.bits
    return wire.write(request.context, bits, request.slots, request.width)


def _describe(wire: "TrainedWire | CodedWire", message: bytes) -> str:
    from lw_jax.inference.coded_wire import CodedWire
    from lw_jax.models import codec

    if isinstance(wire, CodedWire):
        return wire.describe(message)
    frame = codec.read_frame(message)
    return f"{frame.slots} x {frame.width} values of {frame.bits} bits"


def _print_answers(wire: "TrainedWire | CodedWire", message: bytes, request: message_io.Request) -> None:
    text = f" for {len(request.context.encode())} bytes of text" if request.context else ""
    print(f"message: {len(message)} bytes ({_describe(wire, message)}){text}")
    source = "latents:" if wire.recipe.cfg.encoder.kind != "cache" else "message:"
    for question in request.questions:
        print(f"question: {question}")
        for name in wire.recipe.cfg.llms:
            with phase(f"{name} reads the message"):
                answer = wire.read(message, reader=name, question=question)
            print(f"  {name} from {source} {answer}")
            if request.context:
                with phase(f"{name} reads the text"):
                    answer = _read_text(wire, name, request.context, question)
                print(f"  {name} from text:    {answer}")


def _read_text(wire: "TrainedWire | CodedWire", reader: str, text: str, question: str) -> str:
    """Returns the answer from the text, or why a reader cannot take a text that the encoder could."""
    try:
        return wire.read_text(text, reader=reader, question=question)
    except UserError as error:
        return f"not read: {error}"
