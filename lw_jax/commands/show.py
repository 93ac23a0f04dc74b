"""`run.py show`: the resolved configuration with the source of each value, or the reference of all keys (--keys)."""

import argparse
import json
import sys
import textwrap
from itertools import groupby
from typing import Any

from lw_jax.commands.loading import Loaded
from lw_jax.core import config
from lw_jax.core.command_line import PROGRAM
from lw_jax.core.config import diff, flatten, identity, to_dict
from lw_jax.core.config_sections import RECIPES

_COLOURS = {"base": "2", "config": "36", "command line": "33"}
_WIDTH = 110  # columns of the reference


def run(args: argparse.Namespace, *loaded: Loaded) -> None:
    if args.keys:
        print_keys(as_json=args.json)
    for configuration in loaded:
        print_values(configuration, as_json=args.json)


def print_values(loaded: Loaded, *, as_json: bool) -> None:
    cfg, workdir, origins = loaded.cfg, loaded.workdir, loaded.origins
    values = to_dict(cfg)
    flat = flatten(values)
    if as_json:
        resolved = {path: {"value": value, "origin": origins[path]} for path, value in flat.items()}
        print(json.dumps({"digest": identity(cfg), "workdir": str(workdir), "config": resolved}, indent=2))
        return
    width = max(map(len, flat))
    for path, value in flat.items():
        line = f"{path:<{width}}  {origins[path]:<12}  {value!r}"
        print(f"\033[{_COLOURS[origins[path]]}m{line}\033[0m" if sys.stdout.isatty() else line)
    changes = diff(loaded.defaults, values)
    print(f"\n{len(changes)} values differ from the defaults:")
    print("\n".join(f"  {change}" for change in changes))
    print(f"\nworkdir {workdir}, digest {identity(cfg)} (of the keys that decide the result)")


def print_keys(*, as_json: bool) -> None:
    keys = list(config.entries())
    recipes = {
        entry.path: {name: own[entry.path] for name, own in RECIPES.items() if entry.path in own} for entry in keys
    }
    if as_json:
        print(json.dumps([_to_dict(entry, recipes[entry.path]) for entry in keys], indent=2))
        return
    for section, entries in groupby(keys, key=lambda entry: entry.path.rpartition(".")[0]):
        print(f"{section}." if section else "(top level)")
        for entry in entries:
            default = repr(entry.default) + "".join(
                f" ({name}: {value!r})" for name, value in recipes[entry.path].items()
            )
            readers = ", ".join(config.read_by(entry.path))
            facts = [
                default,
                entry.key.unit,
                entry.key.range,
                " | ".join(entry.key.choices),
                readers and f"read by {readers}",
            ]
            print(f"  {entry.path.rpartition('.')[2]:<19} {entry.type}, {'; '.join(filter(None, facts))}")
            print(textwrap.fill(entry.key.doc, _WIDTH, initial_indent=" " * 22, subsequent_indent=" " * 22))
        print()
    print(f"{len(keys)} keys; a reader's under its own name in llms. A file sets c.SECTION.KEY, a flag")
    print(f"--config.SECTION.KEY=VALUE; `{PROGRAM} show --config FILE` prints the values of a configuration.")


def _to_dict(entry: config.Entry, recipes: dict[str, Any]) -> dict[str, Any]:
    rule = entry.key
    return {
        "key": entry.path,
        "type": entry.type,
        "default": entry.default,
        "recipes": recipes,
        "unit": rule.unit,
        "choices": list(rule.choices),
        "range": rule.bounds,
        "read_by": list(config.read_by(entry.path)),
        "doc": rule.doc,
    }
