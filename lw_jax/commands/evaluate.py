"""The command `eval`: control table, joint answers and byte curve of a trained wire."""

import argparse
from pathlib import Path
from typing import Any

import jax

from lw_jax.commands.loading import Loaded
from lw_jax.core import processes, runtime
from lw_jax.core.config import Config
from lw_jax.inference import evaluation
from lw_jax.inference.trained_wire import open_wire
from lw_jax.training.run_folder import check_writable


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command, which has no flags of its own."""
    del args
    return main(loaded.cfg, resolved=loaded.resolved, workdir=loaded.workdir)


@processes.Together()
def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path) -> int:
    """Evaluates the best checkpoint (the latest where none was validated); writes the results to the run's folder.

    Several processes of a SLURM step take a slice of each batch; the first one writes and prints.
    """
    del resolved
    runtime.start()
    if jax.process_index() == 0:
        check_writable(workdir, remedy="`eval` leaves its results in the run's folder: copy it to where you can write")
    runtime.tell_device()
    wire = open_wire(cfg, workdir)
    found = evaluation.evaluate(wire)
    if jax.process_index() == 0:
        paths = evaluation.write(found, workdir, step=wire.step)
        from lw_jax.report import figures, tables  # matplotlib

        drawn = tables.drawable_rows(found.summary)
        if drawn:
            figures.draw_rows(drawn, found.curve).savefig(workdir / "positions.png", dpi=130)
            paths.append(workdir / "positions.png")
        if found.curve:
            figures.draw_curve(found.curve).savefig(workdir / "bytes.png", dpi=130)
            paths.append(workdir / "bytes.png")
        print(evaluation.describe(found))
        print(f"checkpoint {wire.step}; " + ", ".join(map(str, paths)))
    return 0
