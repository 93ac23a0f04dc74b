"""Checked configurations for a command, and what each was made of."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lw_jax.commands.parser import COMMANDS, is_list
from lw_jax.core import config, config_file, validation
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.hub import wire_repository
from lw_jax.training import run_folder, wire_folder

_PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent  # holds configs/: installed, or a checkout


class Loaded(NamedTuple):
    """One configuration."""

    spec: str  # FILE[:recipe]; empty: the configuration saved in `workdir`
    cfg: Config
    workdir: Path
    defaults: Mapping[str, Any]
    origins: Mapping[str, str]  # path -> where its value comes from
    own: Mapping[str, Any]  # keys of `config.SEARCHED` that the file itself sets


def load(args: argparse.Namespace, *, search: bool = False) -> list[Loaded]:
    """Returns the configuration of --config or --workdir; for a FILE.list each of its configurations.

    Args:
        search: the planner chooses the keys of `config.SEARCHED`; only the command line can fix them.

    Raises:
        UserError: no configuration is named, it cannot be read, or a value is wrong.
    """
    if not is_list(args):
        workdir = args.workdir
        if workdir and COMMANDS[args.verb].reads_wire:
            workdir = str(wire_repository.locate(workdir))
        return [_load(args, args.config or "", workdir, search=search)]
    parent = list_workdir(args)
    runs = [_load(args, spec, None, search=search) for spec in config_file.read_list(args.config, root=PROJECT)]
    names = [run.workdir.name for run in runs]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        specs = ", ".join(run.spec for run in runs if run.workdir.name == twins[0])
        raise UserError(f"--config {args.config}: {specs} would share the folder {twins[0]}; rename one of the files")
    return [run._replace(workdir=parent / run.workdir.name) for run in runs]


def list_workdir(args: argparse.Namespace) -> Path:
    return Path(args.workdir or f"runs/{Path(args.config).stem}")


def _load(args: argparse.Namespace, spec: str, workdir: str | None, *, search: bool) -> Loaded:
    values = config_file.load(spec, root=PROJECT) if spec else run_folder.load(workdir, verb=args.verb)
    defaults = config.defaults(str(values.get("recipe", "latentwire")))
    origins = config_file.trace(defaults, values, args.assignments)
    file_values = config_file.set_aside(values, defaults, config.SEARCHED) if search else {}
    config_file.override(values, args.assignments)
    cfg = config.build(values)
    validation.validate(cfg)
    folder = Path(workdir or f"runs/{Path(config_file.split(spec)[0]).stem}-{cfg.recipe}")
    if wire_folder.is_wire(folder) and not COMMANDS[args.verb].reads_wire:
        known = ", ".join(name for name, command in COMMANDS.items() if command.reads_wire)
        rule = f"an exported wire, which is read-only: {known} take it, {args.verb!r} does not"
        raise UserError(f"{folder}: {rule}; name another --workdir. What the wire is stands in its {wire_folder.CARD}.")
    if COMMANDS[args.verb].reads_run:
        run_folder.check_agreement(cfg, folder)
    return Loaded(spec, cfg, folder, defaults, origins, file_values)
