"""Arguments of `run.py`: commands, their modules and flags. Light at import, so that `--help` waits for nothing."""

import argparse
import difflib
import functools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from lw_jax.core.command_line import PROGRAM, take_assignments
from lw_jax.core.errors import UserError
from lw_jax.core.version import __version__

DEFAULT = "train"


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 2**31
    if abs(number) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a whole number below 2^31 is needed")
    return number


def _real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) < 1e9:  # NaN too
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a number below 10^9 is needed")
    return number


def _any_text(text: str) -> str:
    """Returns a text that UTF-8 can hold; a shell hands on undecodable bytes as half surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: character {error.start + 1} is not UTF-8 text") from error
    return text


def _text(text: str) -> str:
    """Returns a text that is not empty, as a variable of the shell is that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("empty, as a variable that is not set: give a value, or leave the flag out")
    return _any_text(text)


def _path(text: str) -> str:
    """Returns a path with its `~` filled in: a shell leaves that of --workdir=~/run. A Path would make "-" of "./-"."""
    return os.path.expanduser(_text(text))  # noqa: PTH111


Flag = Mapping[str, Any]  # keyword arguments of `add_argument`


def _value(metavar: str, help: str, *, kind: Any = _path, **more: Any) -> Flag:
    return {"metavar": metavar, "help": help, "type": kind} | more


def _switch(help: str) -> Flag:
    return {"action": "store_true", "help": help}


class Command(NamedTuple):
    """One command; `module` has `run(args, loaded)`, which returns the exit code."""

    module: str
    summary: str
    flags: Mapping[str, Flag] = {}
    examples: Sequence[str] = ()
    details: str = ""
    reads_run: bool = False  # the configuration must agree with the run in --workdir
    reads_wire: bool = False  # --workdir may be a wire folder, made by export --wire


_TARGET = {"--target": _value("GPUS", "h100x4, a100_40x2, h200x1, 2xh100x8, ...", kind=_text)}
_JSON = {"--json": _switch("print JSON")}
COMMON: Mapping[str, Flag] = {
    "--config": _value("FILE[:recipe]", "configuration file, from the current folder or the project's"),
    "--workdir": _value("DIR", "the run's folder (default: runs/NAME-RECIPE)"),
}

GROUPS: Mapping[str, Mapping[str, Command]] = {
    "train and evaluate": {
        "train": Command(
            "lw_jax.commands.train",
            "train, or resume from the last checkpoint of --workdir (default)",
            examples=(
                "--config configs/smoke.py",
                "--config configs/h100x4.py --config.train.steps=2000 --workdir runs/mine",
                "--config configs/dpo/tinyllama.py --config.data.train=pairs.jsonl",
                "--config configs/ttt/ttt_smoke.py --workdir runs/ttt",
            ),
        ),
        "eval": Command(
            "lw_jax.commands.evaluate",
            "evaluate a trained wire beside its controls",
            reads_run=True,
            reads_wire=True,
            flags={
                "--out": _value("DIR", "folder of the results (default: the run's; a wire folder needs it)"),
                "--reader": _value(
                    "NAME",
                    "of a wire folder: this reader alone; may be repeated (default: all)",
                    kind=_text,
                    action="append",
                ),
            },
            examples=(
                "--workdir runs/mine --config.eval.examples=0",
                "--workdir wires/mine --out runs/mine-again",
                "--workdir wires/pair --reader llama --out runs/llama --config.data.validation=squad_dev-v2.0.json",
            ),
        ),
        "report": Command(
            "lw_jax.commands.report",
            "write WORKDIR/report.html, one page about a run",
            reads_run=True,
            examples=("--workdir runs/mine",),
            details="Works during training too.",
        ),
    },
    "use what was trained": {
        "answer": Command(
            "lw_jax.commands.answer",
            "send a text through the wire; every reader answers",
            reads_run=True,
            reads_wire=True,
            flags={
                "--context": _value("FILE", "the text; '-' is standard input"),
                "--message": _value("FILE", "a message instead of a text; '-' is standard input"),
                "--question": _value("TEXT", "may be repeated", kind=_text, action="append"),
                "--reader": _value(
                    "NAME", "this reader alone answers; may be repeated (default: all)", kind=_text, action="append"
                ),
                "--write": _value("FILE", "write the text's message; '-' is standard output"),
                "--ratio": _value(
                    "N",
                    "kind cache: one of N positions (default: encoder.ratio, or the least of --message)",
                    kind=_whole,
                ),
                "--bits": _value("N", "bits a value: 16, 8, 6, 4 or 2 (default: 8)", kind=_whole),
                "--slots": _value(
                    "N", "send N latents (default: as encoder.ratio says, or encoder.slots)", kind=_whole
                ),
                "--width": _value("N", "send the first N values of each latent (default: all)", kind=_whole),
            },
            examples=(
                '--workdir runs/mine --context notes.txt --question "Who wrote it?"',
                "--workdir runs/mine --context notes.txt --bits 4 --write notes.lwjx",
                '--workdir runs/mine --message notes.lwjx --question "Who wrote it?" --question "When?"',
            ),
        ),
        "generate": Command(
            "lw_jax.commands.generate",
            "continue a prompt with a trained TTT model",
            reads_run=True,
            flags={
                "--prompt": _value("TEXT", "may be repeated", kind=_any_text, action="append"),  # "": from BOS on
                "--tokens": _value("N", "at most N new tokens (default: %(default)s)", kind=_whole, default=100),
                "--temperature": _value("T", "0 is greedy (default: %(default)g)", kind=_real, default=0.0),
                "--seed": _value("N", "of what is drawn at a temperature above 0 (default: config.seed)", kind=_whole),
            },
            examples=('--workdir runs/ttt --prompt "Return the" --tokens 100 --temperature 0.7',),
        ),
        "export": Command(
            "lw_jax.commands.export",
            "write a trained model for other programs",
            reads_run=True,
            flags={
                "--peft": _value("DIR", "preference tuning: the adapter, as PEFT reads it"),
                "--merged": _value("DIR", "preference tuning: the whole model, adapter merged, bf16"),
                "--model": _value("DIR", "TTT: the model with its tokenizer"),
                "--wire": _value("DIR", "a wire alone, with a model card: --workdir of eval and answer takes it"),
                "--push": _value("OWNER/NAME", "upload the wire to the hub, a new repository is private", kind=_text),
                "--license": _value("ID", "the wire's, for its card, as the hub names it: apache-2.0", kind=_text),
                "--dtype": {
                    "choices": ("bf16", "int8", "fp32"),
                    "help": "of the wire's matrices (default: bf16, kind cache: int8)",
                },
            },
            examples=(
                "--workdir runs/mine --wire wires/mine",
                "--workdir runs/mine --wire wires/mine --dtype int8 --push me/my-wire",
                "--workdir runs/tinyllama-dpo --peft adapter",
                "--workdir runs/ttt --model ttt-model",
            ),
        ),
    },
    "plan for GPUs": {
        "plan": Command(
            "lw_jax.commands.plan",
            "memory, placement and time on GPUs that need not be here",
            flags={
                **_TARGET,
                "--estimate": _switch("arithmetic only, no compilation"),
                "--simulate": _value("N..M", "plan each of these numbers of the target's GPUs", kind=_text),
                **_JSON,
            },
            examples=("--config configs/h100x4.py --target a100_80x4", "--config configs/h100x4.py --simulate 1..4"),
            details="Placement, remat and micro-batch of the file are searched anew; flags fix them.",
        ),
        "slurm": Command(
            "lw_jax.commands.slurm",
            "write an sbatch file from the plan",
            flags={
                **_TARGET,
                "--site": _value("FILE", "the cluster's profile (docs/slurm.md)"),
                "--submit": _switch("submit the file with sbatch"),
                "--output": _value("FILE", "the script (default: WORKDIR/job.sbatch)"),
                "--hours": _value("H", "time of the run instead of the predicted one", kind=_real),
                "--measured": _value("DIR", "take the time from an earlier run's folder (of a list: their parent)"),
                "--jobs": {"choices": ("array", "sequence"), "help": "kind of job of a FILE.list (default: array)"},
            },
            examples=(
                "--config configs/h100x4.py --site mysite.toml",
                "--config configs/dpo/all.list --target a100_80x1 --jobs sequence",
            ),
            details="Takes several configurations as --config FILE.list.",
        ),
        "bench": Command(
            "lw_jax.commands.bench",
            "measure the parts of a run here, or predict them for --target",
            flags={
                **_TARGET,
                "--parts": _value("P,P", "some of load, step, encode, prefill, answer, input", kind=_text),
                "--repeats": _value("N", "timings of each part (default: 5)", kind=_whole),
                **_JSON,
            },
            examples=(
                "--config configs/default.py --parts step,answer --repeats 9",
                "--config configs/large.py --target h200x1",
            ),
        ),
    },
    "look at a configuration": {
        "show": Command(
            "lw_jax.commands.show",
            "print the resolved configuration and the source of each value",
            reads_wire=True,
            flags={"--keys": _switch("print the reference of all keys; needs no --config"), **_JSON},
            examples=("--config configs/h100x4.py", "--keys"),
        ),
    },
}
COMMANDS: Mapping[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}

_ASSIGNMENTS = "--config.section.key=value sets one key; `show --keys` lists all keys."


class _Once(argparse.Action):
    """Stores a value and refuses a second one: the first would be lost."""

    _given = False  # of one command line, whose parser is made for it

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if self._given:
            raise argparse.ArgumentError(self, "given twice")
        self._given = True
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the flags of one command, its name as `verb`, and `assignments`, {path: value} of --config.path=value.

    The command may stand anywhere but after a flag, whose value it might be; it is `train` where none is named.
    """
    assignments, words = take_assignments(argv)
    valued = re.compile(r"--(?!help$|version$)[^=]*")
    free = [i for i, word in enumerate(words) if word[:1] != "-" and not (i and valued.fullmatch(words[i - 1]))]
    place = next((i for i in free if words[i] in COMMANDS), 0 if free[:1] == [0] else None)
    if place is None and not {"-h", "--help", "--version"} & set(words):
        words, place = [DEFAULT, *words], 0
    verb = [] if place is None else [words.pop(place)]
    if verb and verb[0] not in COMMANDS:
        raise _refuse("command", repr(verb[0]), COMMANDS, f"the commands are {', '.join(COMMANDS)}.")
    args, unknown = _build().parse_known_args([*verb, *words])
    if unknown:
        raise _refuse_unknown(args.verb, unknown)
    args.assignments = assignments
    if fault := _find_fault(args):
        raise UserError(f"{fault}; see {PROGRAM} {args.verb} --help.")
    return args


def _refuse_unknown(verb: str, words: Sequence[str]) -> UserError:
    flag = words[0].partition("=")[0]
    if flag[:1] != "-":
        return UserError(f"unrecognized arguments: {' '.join(words)}; see {PROGRAM} {verb} --help.")
    if owners := [name for name, spec in COMMANDS.items() if flag in spec.flags]:
        return UserError(f"{flag} belongs to {' and '.join(map(repr, owners))}, not to {verb!r}.")
    return _refuse(
        "flag", flag, [*COMMON, *(flag for spec in COMMANDS.values() for flag in spec.flags)], f"see {PROGRAM} --help."
    )


def _refuse(kind: str, name: str, known: Iterable[str], otherwise: str) -> UserError:
    close = difflib.get_close_matches(name.strip("'"), list(known), n=1)
    return UserError(f"unknown {kind} {name}; " + (f"did you mean {close[0]!r}?" if close else otherwise))


def _build() -> argparse.ArgumentParser:
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
    groups = [
        "\n".join([f"{title}:", *(f"  {name:<10}{command.summary}" for name, command in group.items())])
        for title, group in GROUPS.items()
    ]
    examples = "\n".join(_example(name, command.examples[0]) for name, command in COMMANDS.items())
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [COMMAND] --config FILE[:recipe] [--config.section.key=value ...] [--workdir DIR]",
        description="\n\n".join(groups),
        epilog=f"{PROGRAM} COMMAND --help lists the flags of a command.\n\nexamples:\n{examples}",
        formatter_class=layout,
    )
    version: Flag = {"action": "version", "version": f"LatentWire JAX {__version__}"}
    parser.add_argument("--version", **version)
    commands = parser.add_subparsers(prog=PROGRAM, dest="verb", required=True, help=argparse.SUPPRESS)
    for name, command in COMMANDS.items():
        summary = f"{command.summary[0].upper()}{command.summary[1:]}."
        subparser = commands.add_parser(
            name,
            description="\n".join(filter(None, (summary, command.details))),
            epilog="examples:\n" + "\n".join(_example(name, arguments) for arguments in command.examples),
            formatter_class=layout,
            allow_abbrev=False,
        )
        subparser.register("action", None, _Once)  # of flags that name none
        subparser.add_argument("--version", help=argparse.SUPPRESS, **version)
        common = subparser.add_argument_group("configuration", _ASSIGNMENTS)
        for flag, options in COMMON.items():
            common.add_argument(flag, **options)
        flags = subparser.add_argument_group(f"flags of {name}")
        for flag, options in command.flags.items():
            flags.add_argument(flag, **options)
    return parser


def _example(name: str, arguments: str) -> str:
    return f"  {PROGRAM} {arguments}" if name == DEFAULT else f"  {PROGRAM} {name} {arguments}"


def is_list(args: argparse.Namespace) -> bool:
    return (args.config or "").endswith(".list")


def _find_fault(args: argparse.Namespace) -> str:
    listed = is_list(args)
    if listed and args.verb != "slurm":
        return f"--config {args.config}: only 'slurm' takes a list, {args.verb!r} takes one configuration"
    if args.verb == "report" and args.assignments:
        return f"--config.{next(iter(args.assignments))}: a report shows the run's own configuration; leave it out"
    if args.verb == "show" and args.keys and (args.config or args.workdir or args.assignments):
        return "--keys prints the reference of all keys, of no configuration: leave one of the two out"
    if args.verb == "slurm" and not args.config:
        return "slurm needs --config FILE: the job starts training with it"
    if args.verb == "slurm" and args.jobs and not listed:
        return "--jobs needs --config FILE.list"
    if args.verb == "export" and not (args.peft or args.merged or args.model or args.wire):
        return "export needs --wire DIR, --peft DIR, --merged DIR or --model DIR"
    for flag in ("dtype", "push", "license"):
        if args.verb == "export" and getattr(args, flag) and not args.wire:
            return f"--{flag} {getattr(args, flag)} is of a wire: it needs --wire DIR"
    if args.verb == "generate" and not args.prompt:
        return "generate needs --prompt TEXT"
    return _find_answer_fault(args) if args.verb == "answer" else ""


def _find_answer_fault(args: argparse.Namespace) -> str:
    if bool(args.context) == bool(args.message):
        return "answer needs either --context FILE (a text) or --message FILE (written by --write)"
    for flag in ("write", "bits", "slots", "width"):
        if args.message and getattr(args, flag) is not None:
            return f"--{flag} sets how a text is written: it needs --context, not --message"
    if not args.question and (args.message or not args.write):
        return "answer needs --question TEXT" + ("" if args.message else " or --write FILE")
    if args.question and args.write == "-":
        return "--write - fills standard output with the message: leave out --question, or write to a file"
    return ""
