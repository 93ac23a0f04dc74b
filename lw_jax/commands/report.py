"""The command `report`: one HTML page from a run's folder; needs no network, no device and no weights."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lw_jax.commands.loading import Loaded
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.files import write_whole
from lw_jax.report import page, records


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command, which has no flags of its own."""
    del args
    return main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir)


def main(cfg: Config, *, resolved: Mapping[str, Any], workdir: Path) -> int:
    """Writes WORKDIR/report.html; a part without data names the command that makes it.

    Raises:
      UserError: not a run's folder, a damaged file, or a folder that is not writable.
    """
    del cfg, resolved  # the page shows the run's own configuration
    text = page.render(records.read(workdir))
    path = workdir / page.PAGE
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the run's folder must be writable.") from error
    print(f"{path}: {len(text.encode()) / 1e3:,.0f} kB, opens in any browser")
    return 0
