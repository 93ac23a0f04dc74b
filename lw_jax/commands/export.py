"""The command `export`: a run's trained weights as a wire folder, a PEFT adapter, a merged model or a model folder."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from lw_jax.commands.loading import Loaded
from lw_jax.core import runtime
from lw_jax.core.errors import UserError
from lw_jax.hub import wire_repository
from lw_jax.inference import export
from lw_jax.report import card, records
from lw_jax.training.wire_folder import WireFolder

_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def run(args: argparse.Namespace, loaded: Loaded) -> int:
    """Writes the best checkpoint (the latest where none was validated) to the folders, named by flag."""
    named = {"peft": args.peft, "merged": args.merged, "model": args.model, "wire": args.wire}
    folders = {flag: Path(folder) for flag, folder in named.items() if folder}
    if args.push:
        wire_repository.check_id(args.push)
    if args.license and not _IDENTIFIER.fullmatch(args.license):
        raise UserError(f"--license {args.license!r:.200}: an identifier of the hub is needed, as apache-2.0 or other")
    runtime.start_devices()
    # A damaged file is refused before anything is written.
    record = records.read(loaded.workdir) if "wire" in folders else None

    def describe(wire: WireFolder, sizes: Mapping[str, int]) -> str:
        assert record is not None, "a wire is exported"
        return card.render(record, wire, sizes, repository=args.push or "", licence=args.license or "")

    for line in export.export(loaded.cfg, loaded.workdir, folders, dtype=args.dtype, card=describe):
        print(line)
    if args.push:
        print(f"uploaded to {wire_repository.push(folders['wire'], args.push)}")
    return 0
