"""The command `export`: a run's trained weights as a PEFT adapter, a merged model or a model folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lw_jax.core.config import Config
from lw_jax.inference import export


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path, folders: Mapping[str, Path]) -> int:
    """Writes the best checkpoint (the latest where none was validated) to the folders, named by flag."""
    del resolved
    for line in export.export(cfg, workdir, folders):
        print(line)
    return 0
