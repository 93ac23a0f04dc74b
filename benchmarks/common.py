"""What the scripts of this folder share: their flags, their configuration, their tables, their children."""

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a child, which begins here

from lw_jax.core import command_line, config_file, environment
from lw_jax.core.config import Config, build
from lw_jax.core.errors import UserError, leave

ROOT = Path(__file__).resolve().parent.parent


def parser(
    doc: str | None, argv: Sequence[str] | None, config: str | None = ""
) -> tuple[argparse.ArgumentParser, dict[str, str], list[str]]:
    """Returns a parser with --config, the assignments of a command line, and its other words.

    `config` is the file that is taken where the command line names none; empty: it must name one; None: no --config.
    """
    assignments, words = command_line.take_assignments(argv)
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if config is not None:
        about = "--config.key=value goes with it" + (f" (default: {config})" if config else "")
        found.add_argument("--config", default=config, required=not config, metavar="FILE", help=about)
    return found, assignments, words


def load(spec: str, assignments: Mapping[str, str]) -> Config:
    values = config_file.load(spec, root=ROOT)
    config_file.override(values, assignments)
    return build(values)


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of "1,2,4"; raises ValueError, as argparse wants it, for any below 1."""
    found = tuple(int(word) for word in text.split(","))
    if min(found) < 1:
        raise ValueError
    return found


def number(value: Any, form: str = "", scale: float = 1) -> str:
    """Returns a number, or a word as it is; "-" where there is none."""
    return "-" if value is None else format(value * scale, form)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns; columns without words stand to the right."""
    lines = [tuple(head), *map(tuple, rows)]
    columns = list(zip(*lines, strict=True))
    ends = ["<" if any(re.search("[a-wyzA-Z]", cell) for cell in column[1:]) else ">" for column in columns]
    widths = [max(3, *map(len, column)) for column in columns]
    shown = [
        " | ".join(f"{cell:{end}{width}}" for cell, end, width in zip(line, ends, widths, strict=True))
        for line in lines
    ]
    rule = "|".join("-" * (width + 1) + ("-" if end == "<" else ":") for end, width in zip(ends, widths, strict=True))
    return "\n".join([f"| {shown[0]} |", f"|{rule}|", *(f"| {line} |" for line in shown[1:])])


def columns(rows: Iterable[Mapping[str, Any]], shown: Mapping[str, tuple[Any, ...]]) -> str:
    """Returns a table of rows; `shown` has for each heading the key, and the format and factor of its numbers."""
    return table(list(shown), [[number(row.get(key), *form) for key, *form in shown.values()] for row in rows])


def say(doing: str) -> None:
    print(f"{doing} ...", file=sys.stderr, flush=True)


def apart(
    place: str, *, seconds: float | None = None, env: Mapping[str, str] | None = None, **words: Any
) -> dict[str, Any]:
    """Returns what a function of this folder ("scaling.measure") returns in a process of its own.

    A device's peak memory cannot be set back, and a process that ends gives all of its memory back. `words` and what
    is returned pass as JSON. With `seconds` the process is stopped after so many, and what it writes to stderr is
    kept back but for the error's own line. Raises UserError where it fails.
    """
    begun = subprocess.Popen(
        [sys.executable, __file__, place, json.dumps(words)],
        stdout=subprocess.PIPE,
        stderr=None if seconds is None else subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,  # torch.compile starts processes of its own, which must end with it
    )
    try:
        told, errors = begun.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise UserError(f"took longer than {seconds:g} s") from None
    finally:
        if begun.poll() is None:
            os.killpg(begun.pid, signal.SIGKILL)
            begun.communicate()
    if not begun.returncode:
        return json.loads(told.splitlines()[-1])
    if errors is None:
        raise UserError(f"{place} {words}: ended with code {begun.returncode}; its error is above")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"error:|[\w.]*(Error|Exception|Failed)\b", line)]
    raise UserError(f"failed with code {begun.returncode}: {(named or lines or ['no word'])[-1][:200]}")


def main() -> int:
    """Is the child: calls the function that the first word names with the JSON of the second."""
    place, words = sys.argv[1:]
    script, _, function = place.partition(".")
    if not script.startswith("torch"):  # those know no JAX
        environment.leave_out_torch()
        environment.reserve_memory()
        environment.hide_idle_cuda()
    found = importlib.import_module(f"benchmarks.{script}")
    print(json.dumps(getattr(found, function)(**json.loads(words))))
    return 0


if __name__ == "__main__":
    leave(main)
