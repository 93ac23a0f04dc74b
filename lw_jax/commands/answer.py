"""The command `answer`: encode a text or read a message, and print every reader's answers."""

import argparse
import contextlib
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Prints the message's size and the answers, for a text also the answers from the text itself.

    With --write the message is written; on standard output it is then alone, and the rest goes to stderr.
    """
    # Before JAX is imported; bad channels and messages are refused before any weight is loaded.
    text = message_io.read_text(args.context) if args.context else ""
    message = message_io.read_message(args.message) if args.message else b""
    from lw_jax.core import runtime
    from lw_jax.inference import answering, trained_wire
    from lw_jax.inference.coded_wire import CodedWire

    cfg, questions = loaded.cfg, args.question or []
    _check_message(cfg, args, message)
    answering.check_questions(questions, name="--question")
    if args.write not in (None, "-"):
        file = Path(args.write)
        if file.is_dir():
            raise UserError(f"--write {args.write}: a folder; name a file in it")
        if file.resolve() == Path(args.context or args.message).resolve():
            raise UserError(f"--write {args.write}: what is read from there would be lost; name another file")
        check_writable(file.absolute().parent, remedy="choose another file for --write")
    runtime.tell_device()
    with contextlib.redirect_stdout(sys.stderr if args.write == "-" else sys.stdout):
        wire = trained_wire.open_wire(cfg, loaded.workdir, args.reader or ())
        if message:
            wire = wire.at(args.ratio) if isinstance(wire, CodedWire) else wire
        else:
            with phase("writing the message, which first compiles"):
                if isinstance(wire, CodedWire):
                    message = wire.write(text, ratio=args.ratio, readers=tuple(args.reader or ()))
                else:
                    message = wire.write(text, 8 if args.bits is None else args.bits, args.slots, args.width)
        if args.write not in (None, "-"):
            message_io.write_message(message, args.write)
        _print_answers(wire, message, text, questions, dict.fromkeys(args.reader or cfg.llms))
    if args.write == "-":
        message_io.write_message(message, args.write)
    return 0


def _check_message(cfg: Config, args: argparse.Namespace, message: bytes) -> None:
    from lw_jax.inference import coded_wire, trained_wire
    from lw_jax.models import cache_codec, codec

    cache = cfg.encoder.kind == "cache"
    for name in ("bits", "slots", "width") if cache else ("ratio",):
        if (value := getattr(args, name)) is not None:
            rule = "a message of this wire has no such size (config.encoder.kind)"
            raise UserError(f"--{name} {value}: {rule}; {'--ratio sets its positions' if cache else 'leave it out'}")
    if message:
        (cache_codec if cache else codec).read_frame(message)
    if cache:
        coded_wire.check_ratio(cfg.encoder.ratio if args.ratio is None else args.ratio, name="--ratio")
    elif not message:
        bits = 8 if args.bits is None else args.bits
        trained_wire.resolve_channel(cfg.encoder, bits=bits, slots=args.slots, width=args.width)


def _print_answers(
    wire: "TrainedWire | CodedWire", message: bytes, text: str, questions: list[str], readers: Collection[str]
) -> None:
    from lw_jax.inference.coded_wire import CodedWire
    from lw_jax.models import codec

    if isinstance(wire, CodedWire):
        source, described = "message:", wire.describe(message)
    else:
        source, frame = "latents:", codec.read_frame(message)
        described = f"{frame.slots} x {frame.width} values of {frame.bits} bits"
    size = f" for {len(text.encode())} bytes of text" if text else ""
    print(f"message: {len(message)} bytes ({described}){size}")
    if questions:  # the others' programs are mostly those of the first one
        with phase("compiling"):
            wire.compile_answers(message, questions[0], readers, text=text)
    for question in questions:
        print(f"question: {question}")
        for name in readers:
            with phase(f"{name} reads the message"):
                answer = wire.read(message, reader=name, question=question)
            print(f"  {name} from {source} {answer}")
            if text:
                with phase(f"{name} reads the text"):
                    try:
                        answer = wire.read_text(text, reader=name, question=question)
                    except UserError as error:
                        answer = f"not read: {error}"
                print(f"  {name} from text:    {answer}")
