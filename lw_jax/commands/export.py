"""The command `export`: a run's trained weights as a wire folder, a PEFT adapter, a merged model or a model folder."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lw_jax.commands.loading import Loaded
from lw_jax.core import runtime
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.hub import wire_repository
from lw_jax.inference import export
from lw_jax.report import card, records
from lw_jax.training.wire_folder import DType, WireFolder

_UNPUBLISHED = card.Publication()
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Runs the command with its flags."""
    named = {"peft": args.peft, "merged": args.merged, "model": args.model, "wire": args.wire}
    folders = {flag: Path(folder) for flag, folder in named.items() if folder}
    if args.push:
        wire_repository.check_id(args.push)
    if args.license and not _IDENTIFIER.fullmatch(args.license):
        raise UserError(f"--license {args.license!r:.200}: an identifier of the hub is needed, as apache-2.0 or other")
    kept = {"resolved": loaded.resolved, "workdir": loaded.workdir, "folders": folders}
    published = card.Publication(repository=args.push or "", licence=args.license or "")
    code = main(loaded.cfg, **kept, dtype=args.dtype, published=published)
    if args.push:
        print(f"uploaded to {wire_repository.push(folders['wire'], args.push)}")
    return code


def main(
    cfg: Config,
    *,
    resolved: dict[str, Any],
    workdir: Path,
    folders: Mapping[str, Path],
    dtype: DType | None = None,
    published: card.Publication = _UNPUBLISHED,
) -> int:
    """Writes the best checkpoint (the latest where none was validated) to the folders, named by flag.

    `dtype` and `published` are of a wire.
    """
    del resolved
    runtime.start_devices()
    told = records.read(workdir) if "wire" in folders else None  # a damaged file is refused before anything is written

    def describe(wire: WireFolder, sizes: Mapping[str, int]) -> str:
        assert told is not None, "a wire is exported"
        return card.render(told, wire, sizes, published)

    for line in export.export(cfg, workdir, folders, dtype=dtype, card=describe):
        print(line)
    return 0
