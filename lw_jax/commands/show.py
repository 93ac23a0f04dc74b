"""The verb `show`: the resolved configuration, and where each value comes from."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lw_jax.commands.loading import Loaded
from lw_jax.core.config import Config, diff, digest, flatten, meaning

_COLOURS = {"base": "2", "config": "36", "command line": "33"}


def run(args: argparse.Namespace, loaded: Loaded) -> None:
    """Runs the command with its flags."""
    sources = {"base": loaded.defaults, "origins": loaded.origins}
    main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir, **sources, as_json=args.json)


def main(
    cfg: Config,
    *,
    resolved: Mapping[str, Any],
    workdir: Path,
    base: Mapping[str, Any],
    origins: Mapping[str, str],
    as_json: bool = False,
) -> None:
    """Prints every value with its origin and the difference from `configs/base.py`; starts no device."""
    flat = flatten(resolved)
    if as_json:
        values = {path: {"value": value, "origin": origins[path]} for path, value in flat.items()}
        print(json.dumps({"digest": digest(meaning(cfg)), "workdir": str(workdir), "config": values}, indent=2))
        return
    width = max(map(len, flat))
    for path, value in flat.items():
        line = f"{path:<{width}}  {origins[path]:<12}  {value!r}"
        print(f"\033[{_COLOURS[origins[path]]}m{line}\033[0m" if sys.stdout.isatty() else line)
    changes = diff(base, resolved)
    print(f"\n{len(changes)} values differ from configs/base.py:")
    print("\n".join(f"  {change}" for change in changes))
    print(f"\nworkdir {workdir}, digest {digest(meaning(cfg))} (of what decides the result)")
