"""The command `train`: trains a configuration, or resumes its run."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lw_jax.commands.loading import Loaded
from lw_jax.core.config import Config
from lw_jax.training import run_folder, trainer


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Writes the run's folder and trains."""
    del args
    if os.environ.get("SLURM_PROCID", "0") == "0":  # of several processes one writes
        run_folder.lock(loaded.workdir)
        run_folder.write_workdir(loaded.workdir, cfg=loaded.cfg, base=loaded.defaults, command=sys.argv)
    return main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir)


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path) -> int:
    """Trains; returns the exit code."""
    return trainer.main(cfg, resolved=resolved, workdir=workdir)
