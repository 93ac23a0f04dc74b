"""What the scripts of this folder share: their configuration, their lists of numbers, their children."""

import json
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


def child(words: Sequence[str]) -> dict[str, Any]:
    """Returns what a script says in its last line, JSON; raises UserError where it fails."""
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(words)}: ended with code {done.returncode}; its error is above")
    return json.loads(done.stdout.splitlines()[-1])
