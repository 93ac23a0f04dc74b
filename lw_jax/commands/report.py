"""The command `report`: one HTML page from a run's folder; needs no network, no device and no weights."""

import argparse

from lw_jax.commands.loading import Loaded
from lw_jax.core.errors import UserError
from lw_jax.core.files import write_whole
from lw_jax.report import page, records


def run(_: argparse.Namespace, loaded: Loaded) -> int:
    """Writes WORKDIR/report.html; a part without data names the command that makes it.

    Raises:
      UserError: not a run's folder, a damaged file, or a folder that is not writable.
    """
    text = page.render(records.read(loaded.workdir))
    path = loaded.workdir / page.PAGE
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the run's folder must be writable.") from error
    print(f"{path}: {len(text.encode()) / 1e3:,.0f} kB, opens in any browser")
    return 0
