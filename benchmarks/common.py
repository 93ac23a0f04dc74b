"""What the scripts of this folder share: their configuration, their lists of numbers, their children."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lw_jax.core import config_file
from lw_jax.core.config import Config, build
from lw_jax.core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def load(spec: str, assignments: Mapping[str, str]) -> Config:
    """Returns a configuration file with the values of the command line."""
    values = config_file.load(spec, root=ROOT)
    config_file.override(values, assignments)
    return build(values)


def flags(assignments: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that set these values."""
    return [f"--config.{path}={value}" for path, value in assignments.items()]


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of "1,2,4"; raises ValueError, as argparse wants it, for any below 1."""
    found = tuple(int(word) for word in text.split(","))
    if min(found) < 1:
        raise ValueError
    return found


def child(
    words: Sequence[str], *, seconds: float | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns what a script says in its last line, JSON; raises UserError where it fails.

    With `seconds` it is stopped after so many, and what it writes to stderr is kept back but for the error's own line.
    """
    begun = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=None if seconds is None else subprocess.PIPE,
        text=True,
        env=environment,
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
        raise UserError(f"{' '.join(words)}: ended with code {begun.returncode}; its error is above")
    raise UserError(f"failed with code {begun.returncode}: {_reason(errors)}")


def _reason(errors: str) -> str:
    """Returns the line of a stderr that names the error, the last of them, at most 200 characters."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"error:|[\w.]*(Error|Exception|Failed)\b", line)]
    return (named or lines or ["no word"])[-1][:200]
