"""The command `eval`: control table, joint answers and byte curve of a trained wire."""

import argparse
from pathlib import Path

import jax

from lw_jax.commands.loading import Loaded
from lw_jax.core import processes, runtime, validation
from lw_jax.core.errors import UserError
from lw_jax.inference import evaluation
from lw_jax.inference.trained_wire import open_wire
from lw_jax.training import run_folder, wire_folder


@processes.Together()
def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Evaluates the best checkpoint (the latest where none was validated); writes the results to --out.

    Without it they go to the run's folder. Of an exported wire --reader names the readers that are loaded. Several
    processes of a SLURM step take a slice of each batch; the first one writes and prints.
    """
    cfg, workdir = loaded.cfg, loaded.workdir
    folder = Path(args.out) if args.out else workdir
    if args.reader and not wire_folder.is_wire(workdir):
        rule = "a run is evaluated with all of its readers; export it, and evaluate the wire"
        raise UserError(f"--reader {args.reader[0]}: {rule}")
    if wire_folder.is_wire(folder):
        rule = "an exported wire is read-only: name another folder for the results, --out DIR"
        raise UserError(f"{folder}: {rule}")
    if (folder / "config.json").exists() and folder.resolve() != workdir.resolve():
        rule = "another run's folder: its own evaluation would be replaced; name another folder for the results"
        raise UserError(f"--out {folder}: {rule}")
    runtime.start()
    if cfg.encoder.kind == "cache":  # what training alone needs, a teacher, is not needed here
        validation.check_processes(cfg, jax.process_count())
    if jax.process_index() == 0:
        run_folder.check_writable(folder, remedy="`eval` leaves its results there: name another folder with --out DIR")
        run_folder.lock(folder, run_folder.EVAL_LOCK, flag="--out")
    runtime.tell_device()
    wire = open_wire(cfg, workdir, args.reader or ())
    if jax.process_index() == 0:
        print(f"{workdir}: checkpoint {wire.step}, read by {', '.join(wire.recipe.cfg.llms)}", flush=True)
    results = evaluation.evaluate(wire, folder=folder)
    if jax.process_index() == 0:
        paths = evaluation.write(results, folder, step=wire.step, data=cfg.data.validation)
        from lw_jax.report import figures, tables  # matplotlib

        drawn = tables.drawable_rows(results.summary)
        pictures = {
            "positions.png": figures.draw_rows(drawn, results.curve) if drawn else None,
            "bytes.png": figures.draw_curve(results.curve) if results.curve else None,
        }
        for name, picture in pictures.items():
            if picture:
                picture.savefig(folder / name, dpi=130)
                paths.append(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)  # of an earlier evaluation
        print(evaluation.describe(results))
        print(f"written to {folder}, of checkpoint {wire.step}: {', '.join(path.name for path in paths)}")
    return 0
