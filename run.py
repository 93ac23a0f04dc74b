"""The one command: `python run.py [VERB] --config FILE[:recipe] [--config.section.key=value ...]`; no verb trains."""

import argparse
import contextlib
import errno
import importlib
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lw_jax.core.config import suggest
from lw_jax.core.errors import UserError
from sharding.errors import PlacementError

ROOT = Path(__file__).resolve().parent
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # what the user can mend, anywhere
VERBS = {
    "train": ("lw_jax.commands.train", "trains, or goes on from the last checkpoint of --workdir (the default verb)"),
    "eval": ("lw_jax.commands.evaluate", "measures a trained wire beside its controls; --workdir alone is enough"),
    "plan": (
        "lw_jax.commands.plan",
        "says before queueing whether a configuration fits on --target, how, and how long it takes;\n"
        "            the file's own placement, remat and micro-batch are searched anew, those of flags are kept",
    ),
    "slurm": (
        "lw_jax.commands.slurm",
        "writes an sbatch file from the plan; of several configurations, a FILE.list, as an array or a sequence",
    ),
    "bench": (
        "lw_jax.commands.bench",
        "times the training step, encoding, answering, reading and loading, beside what this machine reaches;\n"
        "            with --target predicts the first three for cards that are not here",
    ),
    "answer": (
        "lw_jax.commands.answer",
        "sends a text through the wire and lets every reader answer; --write keeps the message,\n"
        "            --message reads one from a file or a pipe",
    ),
    "report": (
        "lw_jax.commands.report",
        "writes one page of what --workdir holds, WORKDIR/report.html, also in training",
    ),
    "export": (
        "lw_jax.commands.export",
        "writes what a run has learned: --peft DIR (an adapter) or --merged DIR (a whole model) of preference tuning,\n"
        "            --model DIR (the authors' layout) of a TTT model",
    ),
    "generate": ("lw_jax.commands.generate", "continues --prompt TEXT with the TTT model that --workdir has trained"),
    "show": ("lw_jax.commands.show", "prints the resolved configuration and where each value comes from"),
}
EXAMPLES = """examples:
  python run.py --config configs/smoke.py
  python run.py train --config configs/h100x4.py --config.train.steps=2000 --workdir runs/mine
  python run.py eval --workdir runs/mine --config.eval.examples=0
  python run.py report --workdir runs/mine
  python run.py answer --workdir runs/mine --context notes.txt --question "Who wrote it?"
  python run.py answer --workdir runs/mine --context notes.txt --bits 4 --write notes.lwjx
  python run.py answer --workdir runs/mine --message notes.lwjx --question "Who wrote it?"
  python run.py --config configs/dpo/tinyllama.py --config.data.train=pairs.jsonl
  python run.py export --workdir runs/tinyllama-dpo --peft adapter
  python run.py --config configs/ttt/ttt_smoke.py --workdir runs/ttt
  python run.py generate --workdir runs/ttt --prompt "Return the" --tokens 100 --temperature 0.7
  python run.py export --workdir runs/ttt --model ttt-model
  python run.py show --config configs/h100x4.py
  python run.py plan --config configs/h100x4.py --target a100_80x4
  python run.py bench --config configs/default.py --parts step,answer --repeats 9
  python run.py bench --config configs/large.py --target h200x1
  python run.py slurm --config configs/h100x4.py --site mysite.toml
  python run.py slurm --config configs/dpo/all.list --target a100_80x1 --jobs sequence"""


def _whole(text: str) -> int:
    """Returns a whole number that fits into 32 bits."""
    try:
        number = int(text)
    except ValueError:
        number = 2**31
    if abs(number) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a whole number below 2^31 is needed")
    return number


def _real(text: str) -> float:
    """Returns a finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) < 1e9:  # NaN too
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a number below 10^9 is needed")
    return number


def _text(text: str) -> str:
    """Returns a text that UTF-8 can hold: bytes that are no text come from the shell as half surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: character {error.start + 1} is no text in UTF-8") from error
    return text


# Flags that belong to some verbs only: the verbs, what argparse is told.
FLAGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "context": (("answer",), {"metavar": "FILE", "help": "the text, '-' for standard input"}),
    "question": (("answer",), {"type": _text, "action": "append", "metavar": "TEXT", "help": "may be repeated"}),
    "message": (("answer",), {"metavar": "FILE", "help": "a message instead of a text, '-' for standard input"}),
    "write": (("answer",), {"metavar": "FILE", "help": "keeps the text's message, '-' for standard output"}),
    "bits": (("answer",), {"type": _whole, "metavar": "N", "help": "of a value, 16, 8, 6, 4 or 2 (default: 8)"}),
    "slots": (("answer",), {"type": _whole, "metavar": "N", "help": "sends the first N latents (default: all)"}),
    "width": (("answer",), {"type": _whole, "metavar": "N", "help": "the first N values of each (default: all)"}),
    "peft": (("export",), {"metavar": "DIR", "help": "the adapter folder that PEFT reads"}),
    "merged": (("export",), {"metavar": "DIR", "help": "the model with the adapter added in, bf16"}),
    "model": (("export",), {"metavar": "DIR", "help": "a TTT model with its tokenizer"}),
    "prompt": (("generate",), {"type": _text, "action": "append", "metavar": "TEXT", "help": "may be repeated"}),
    "tokens": (("generate",), {"type": _whole, "metavar": "N", "help": "at most so many (default: 100)"}),
    "temperature": (
        ("generate",),
        {"type": _real, "metavar": "T", "help": "0 takes the likeliest (default: 0)"},
    ),
    "parts": (("bench",), {"type": _text, "metavar": "P,P", "help": "some of load, step, encode, answer, input"}),
    "repeats": (("bench",), {"type": _whole, "metavar": "N", "help": "of each thing that is timed (default: 5)"}),
    "keys": (("show",), {"action": "store_true", "help": "the reference of all keys; needs no --config"}),
    "json": (("show", "plan", "bench"), {"action": "store_true", "help": "for programs"}),
    "target": (
        ("plan", "slurm", "bench"),
        {"type": _text, "metavar": "GPUS", "help": "h100x4, a100_40x2, h200x1, 2xh100x8, ..."},
    ),
    "estimate": (("plan",), {"action": "store_true", "help": "by arithmetic, without compiling"}),
    "simulate": (
        ("plan",),
        {"type": _text, "metavar": "N..M", "help": "what is done with so many of the target's cards"},
    ),
    "legacy": (("plan",), {"action": "store_true", "help": "beside the original project's batch formula"}),
    "site": (("slurm",), {"metavar": "FILE", "help": "the cluster's profile (docs/slurm.md)"}),
    "submit": (("slurm",), {"action": "store_true", "help": "runs sbatch"}),
    "output": (("slurm",), {"metavar": "FILE", "help": "the script (default: WORKDIR/job.sbatch)"}),
    "hours": (("slurm",), {"type": _real, "metavar": "H", "help": "instead of the predicted time"}),
    "measured": (
        ("slurm",),
        {"metavar": "DIR", "help": "time from this earlier run's folder (a list: folders)"},
    ),
    "jobs": (("slurm",), {"choices": ("array", "sequence"), "help": "of a FILE.list (default: array)"}),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python run.py --help.")


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the words that are not `--config.key=value`; the verb may stand anywhere among them."""
    verbs = "\n".join(f"  {name:<10}{line}" for name, (_, line) in VERBS.items())
    usage = "python run.py [VERB] --config FILE[:recipe] [--config.section.key=value ...] [--workdir DIR]"
    parser = _Parser(usage=usage, description=f"verbs:\n{verbs}", epilog=EXAMPLES, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", nargs="?", default="train", help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE[:recipe]", help="from the current folder or the project's")
    parser.add_argument("--workdir", metavar="DIR", help="the run's folder (default: runs/NAME-RECIPE)")
    for flag, (owners, words) in FLAGS.items():
        told: dict[str, Any] = words | {"help": f"{', '.join(owners)}: {words['help']}"}
        parser.add_argument(f"--{flag}", **told)
    args = parser.parse_intermixed_args(argv)
    if args.verb not in VERBS:
        parser.error(f"{args.verb!r} is no verb.{suggest(args.verb, VERBS)} The verbs are {', '.join(VERBS)}")
    for flag, (owners, _) in FLAGS.items():
        value = getattr(args, flag)
        if value is not None and value is not False and args.verb not in owners:
            parser.error(f"--{flag} belongs to {' and '.join(map(repr, owners))}, not to {args.verb!r}")
    if args.verb == "answer" and (fault := _find_fault(args)):
        parser.error(fault)
    listed = (args.config or "").endswith(".list")
    if args.jobs and not listed:
        parser.error("--jobs goes with --config FILE.list")
    if listed and args.verb != "slurm":
        parser.error(f"--config {args.config}: a list is for 'slurm'; {args.verb!r} takes one configuration")
    if args.verb == "export" and not (args.peft or args.merged or args.model):
        parser.error("export needs --peft DIR, --merged DIR or --model DIR")
    if args.verb == "generate" and not args.prompt:
        parser.error("generate needs --prompt TEXT")
    return args


def _find_fault(args: argparse.Namespace) -> str:
    """Returns what is wrong with the flags of `answer`; nothing where they fit together."""
    if bool(args.context) == bool(args.message):
        return "answer needs either --context FILE (a text) or --message FILE (what --write wrote)"
    for flag in ("write", "bits", "slots", "width"):
        if args.message and getattr(args, flag) is not None:
            return f"--{flag} says how a text is written: it goes with --context, not with --message"
    if not args.question and not args.write:
        return "answer needs --question TEXT" + ("" if args.message else " or --write FILE")
    if args.question and args.write == "-":
        return "--write - gives standard output to the message: leave out --question, or write to a file"
    return ""


def prepare(args: argparse.Namespace, assignments: dict[str, str]) -> dict[str, Any]:
    """Returns the arguments of the verb's `main`, the configuration under `cfg`; writes the folder of a new run."""
    from lw_jax.core import environment
    from lw_jax.training import run_folder as folder

    if (args.config or "").endswith(".list"):
        return _prepare_list(args, assignments)
    request, found = _resolve(args, args.config, assignments)
    cfg, workdir = request["cfg"], Path(args.workdir or f"runs/{found.name}")
    request["workdir"] = workdir
    if args.verb in ("plan", "slurm"):
        environment.prepare_compiler(everywhere=bool(args.target or args.simulate))
        return request | {"request": _planning(args, assignments, found.own)}
    if args.verb == "show":
        return request | {"base": found.defaults.to_dict(), "origins": found.origins, "as_json": args.json}
    if args.verb == "bench":
        if args.target:
            environment.prepare_compiler(everywhere=True)
        return request | {"request": _benchmarking(args)}
    if args.verb != "train":
        folder.check_agreement(cfg, workdir)
    elif os.environ.get("SLURM_PROCID", "0") == "0":  # of several processes one writes
        folder.lock(workdir)
        folder.write_workdir(workdir, cfg=cfg, base=found.defaults.to_dict(), command=sys.argv)
    if args.verb == "answer":
        request["request"] = _asking(args)
    if args.verb == "export":
        named = {flag: getattr(args, flag) for flag in ("peft", "merged", "model")}
        request["folders"] = {flag: Path(folder) for flag, folder in named.items() if folder}
    if args.verb == "generate":
        tokens = 100 if args.tokens is None else args.tokens
        request |= {"prompts": tuple(args.prompt), "tokens": tokens, "temperature": args.temperature or 0.0}
    return request


class _Found(NamedTuple):
    """What a configuration was made of."""

    defaults: Any  # ConfigDict of configs/base.py
    origins: Any
    own: dict[str, Any]  # what the file itself sets of config.SEARCHED
    name: str


def _resolve(args: argparse.Namespace, spec: str | None, assignments: dict[str, str]) -> tuple[dict[str, Any], _Found]:
    """Returns {"cfg", "resolved"} of one configuration, checked, and what it was made of."""
    from configs import base
    from lw_jax.core import config, config_file, validation
    from lw_jax.training import run_folder as folder

    values = config_file.load(spec, root=ROOT) if spec else folder.load(args.workdir, verb=args.verb)
    defaults = base.get_config(str(values.get("recipe", "latentwire")))
    origins = config_file.trace(defaults, values, assignments)
    planning = args.verb in ("plan", "slurm") or (args.verb == "bench" and args.target)
    own = config_file.set_aside(values, defaults, config.SEARCHED) if planning else {}
    config_file.override(values, assignments)
    cfg = config.build(values)
    validation.validate(cfg)
    name = f"{Path(config_file.split(spec)[0]).stem}-{cfg.recipe}" if spec else ""
    return {"cfg": cfg, "resolved": config.to_dict(cfg)}, _Found(defaults, origins, own, name)


def _prepare_list(args: argparse.Namespace, assignments: dict[str, str]) -> dict[str, Any]:
    """Returns the arguments of `slurm.main_list`, the tasks under `cfg`."""
    from lw_jax.core import config_file, environment
    from lw_jax.slurm import job_list

    environment.prepare_compiler(everywhere=bool(args.target))
    workdir, tasks = Path(args.workdir or f"runs/{Path(args.config).stem}"), []
    for spec in config_file.read_list(args.config, root=ROOT):
        found, made = _resolve(args, spec, assignments)
        tasks.append(job_list.Task(found["cfg"], found["resolved"], workdir / made.name, spec))
    request = _planning(args, assignments, {})
    return {"cfg": tasks, "kind": args.jobs or "array", "workdir": workdir, "request": request}


def _asking(args: argparse.Namespace) -> Any:
    """Returns what `answer` is asked; texts and messages are read here, before anything heavy starts."""
    from lw_jax.inference import message_io

    return message_io.Request(
        context=message_io.read_text(args.context) if args.context else "",
        message=message_io.read_message(args.message) if args.message else b"",
        questions=tuple(args.question or ()),
        write=args.write or "",
        bits=8 if args.bits is None else args.bits,
        slots=args.slots,
        width=args.width,
    )


def _benchmarking(args: argparse.Namespace) -> Any:
    """Returns the words that ask for a benchmark."""
    from lw_jax.commands import bench

    parts = tuple(filter(None, (args.parts or "").split(",")))
    if unknown := [part for part in parts if part not in bench.PARTS]:
        raise UserError(f"--parts {unknown[0]}:{suggest(unknown[0], bench.PARTS)} Parts are {', '.join(bench.PARTS)}.")
    repeats = 5 if args.repeats is None else args.repeats
    if repeats < 1:
        raise UserError(f"--repeats {repeats}: at least one is needed.")
    if args.target and args.repeats is not None:
        raise UserError(f"--repeats {repeats}: nothing runs on --target {args.target}; leave one of them out.")
    return bench.Request(parts, repeats, args.json, args.target or "")


def _planning(args: argparse.Namespace, assignments: dict[str, str], own: dict[str, Any]) -> Any:
    """Returns the words that ask for a plan or a job."""
    config, target = args.config or "", args.target or ""
    if args.verb == "plan":
        from lw_jax.commands import plan

        return plan.Request(config, target, args.simulate or "", args.estimate, args.json, args.legacy, own)
    from lw_jax.slurm import job

    site, output = args.site or "", args.output or ""
    measured = Path(args.measured) if args.measured else None
    return job.Request(config, assignments, ROOT, target, site, args.submit, output, args.hours, measured)


def _run(args: argparse.Namespace, assignments: dict[str, str]) -> int:
    from lw_jax.core import environment

    if args.keys:
        from lw_jax.commands import show

        show.print_keys(as_json=args.json)
        return 0
    environment.reserve_memory()
    request = prepare(args, assignments)
    computes = args.verb not in ("show", "report", "plan", "slurm") and not args.target
    if computes and (line := environment.hide_idle_cuda()):
        print(line, file=sys.stderr)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that PyTorch is absent, as it should be
    command = importlib.import_module(VERBS[args.verb][0])
    start = command.main_list if "kind" in request else command.main
    return start(request.pop("cfg"), **request) or 0


def main(argv: list[str]) -> int:
    """Runs one verb; returns the exit code: 0, 2 for what the user can mend, 130 interrupted, or the verb's own."""
    from lw_jax.core import config_file, early_signals

    try:
        assignments, words = config_file.take_assignments(argv)
        args = parse(words)
        with early_signals.at_once() if args.verb == "train" else contextlib.nullcontext():
            return _run(args, assignments)
    except (UserError, PlacementError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has left, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if error.errno not in UNWRITABLE:
            raise
        where = "--workdir names a run's folder, LW_JAX_CACHE that of what is fetched, made and compiled"
        print(f"error: {error.filename or 'a file'}: {error.strerror}; {where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
