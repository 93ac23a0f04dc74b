"""The program's name, and assignments of the command line, `--config.section.key=value`; light at import."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lw_jax.core.errors import UserError

# The second is the module of jobs that an installed program writes.
PROGRAM = "lw-jax" if Path(sys.argv[0]).name in ("lw-jax", "program.py") else "python run.py"


def take_assignments(argv: Sequence[str] | None) -> tuple[dict[str, str], list[str]]:
    """Returns ({path: value} of the `--config.path=value` and `--config.path value` words, the other words).

    None, as argparse has it: the words of the process.
    """
    assignments: dict[str, str] = {}
    remaining: list[str] = []
    words = iter(sys.argv[1:] if argv is None else argv)
    for word in words:
        if not word.startswith("--config."):
            remaining.append(word)
            continue
        path, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise UserError(f"--config.{path}: a value is needed, --config.{path}=VALUE.")
        assignments[path] = value
    return assignments, remaining
