"""Command `bench`: seconds of a configuration's parts, measured on this machine or predicted for GPUs elsewhere."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import jax

from lw_jax.benchmarking.measurement import PARTS, Measured
from lw_jax.benchmarking.prediction import Predicted
from lw_jax.benchmarking.rows import Row, table
from lw_jax.commands.loading import Loaded
from lw_jax.core import runtime
from lw_jax.core.config import Config, suggest
from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase
from lw_jax.hub import sources
from lw_jax.planning import planner
from lw_jax.training.run_folder import check_writable

FILE = "bench.json"


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Measures or predicts the parts asked for, prints them and writes WORKDIR/bench.json.

    Raises:
        UserError: several processes, a part that the recipe does not have, or one that needs what cannot be had.
    """
    parts = tuple(filter(None, (args.parts or "").split(",")))
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"--parts {unknown[0]}:{suggest(unknown[0], PARTS)} Parts are {', '.join(PARTS)}.")
    repeats = 5 if args.repeats is None else args.repeats
    if repeats < 1:
        raise UserError(f"--repeats {repeats}: at least one is needed.")
    if args.target and args.repeats is not None:
        raise UserError(f"--repeats {repeats}: nothing runs on --target {args.target}; leave one of them out.")
    workdir = loaded.workdir
    if not loaded.cfg.train.steps:
        raise UserError(
            "bench: config.train.steps = 0 has no step to time; `eval` measures seconds to write, open and answer from "
            "a message, `plan --target` predicts the start's"
        )
    check_writable(workdir, remedy="the figures are kept in the run's folder: choose --workdir")
    benchmark = Predicted(loaded.cfg, args.target) if args.target else _start(loaded.cfg, repeats)
    rows = []
    for part in parts or benchmark.parts:
        doing = f"is compiled for {args.target}" if args.target else PARTS[part]
        print(f"{part}: {doing}", file=sys.stderr, flush=True)
        with phase(part):
            rows += benchmark.measure(part, asked=bool(parts))
    text = json.dumps(_result(benchmark, rows), indent=2) + "\n"
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / FILE).write_text(text, "utf-8")
    print(text if args.json else table(benchmark.device, benchmark.ceilings, rows, loaded.cfg.llms), end="")
    return 0


def _result(benchmark: Measured | Predicted, rows: list[Row]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "device": benchmark.device,
        "devices": benchmark.placement.devices,
        "placement": benchmark.placement.describe(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
        | {"python": platform.python_version()},
        "environment": {name: os.environ[name] for name in ("XLA_FLAGS", "GLIBC_TUNABLES") if name in os.environ},
        "ceilings": dataclasses.asdict(benchmark.ceilings),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _start(cfg: Config, repeats: int) -> Measured:
    if runtime.start():
        raise UserError(f"{jax.process_count()} processes: measure in one, on the devices of one machine")
    runtime.tell_device()
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    return Measured(*planner.resolve_auto(cfg), repeats)
