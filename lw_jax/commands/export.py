"""The command `export`: a run's trained weights as a wire folder, a PEFT adapter, a merged model or a model folder."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lw_jax.commands.loading import Loaded
from lw_jax.core.config import Config
from lw_jax.hub import sources
from lw_jax.inference import export
from lw_jax.report import card, records
from lw_jax.training.wire_folder import DType


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command with its flags."""
    named = {"peft": args.peft, "merged": args.merged, "model": args.model, "wire": args.wire}
    folders = {flag: Path(folder) for flag, folder in named.items() if folder}
    if args.push:
        sources.check_hub_id(args.push)
    kept = {"resolved": loaded.resolved, "workdir": loaded.workdir, "folders": folders}
    code = main(loaded.cfg, **kept, dtype=args.dtype or "bf16")
    if args.push:
        print(f"uploaded to {sources.push_wire(folders['wire'], args.push)}")
    return code


def main(
    cfg: Config, *, resolved: dict[str, Any], workdir: Path, folders: Mapping[str, Path], dtype: DType = "bf16"
) -> int:
    """Writes the best checkpoint (the latest where none was validated) to the folders, named by flag."""
    del resolved
    told = records.read(workdir) if "wire" in folders else None  # a damaged file is refused before anything is written
    for line in export.export(
        cfg, workdir, folders, dtype=dtype, card=lambda wire, sizes: card.render(told, wire, sizes) if told else ""
    ):
        print(line)
    return 0
