"""The command `export`: a run's trained weights as a PEFT adapter, a merged model or a model folder."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lw_jax.commands.loading import Loaded
from lw_jax.core.config import Config
from lw_jax.inference import export


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command with its flags."""
    named = {"peft": args.peft, "merged": args.merged, "model": args.model}
    folders = {flag: Path(folder) for flag, folder in named.items() if folder}
    return main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir, folders=folders)


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path, folders: Mapping[str, Path]) -> int:
    """Writes the best checkpoint (the latest where none was validated) to the folders, named by flag."""
    del resolved
    for line in export.export(cfg, workdir, folders):
        print(line)
    return 0
