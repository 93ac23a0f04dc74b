"""What a run leaves in its folder before anything else, and reads back: the words that made it."""

import dataclasses
import importlib.metadata
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lw_jax.core.config import Config, build, complete, diff, meaning, to_dict
from lw_jax.core.errors import UserError
from lw_jax.core.files import write_whole

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "flax", "optax", "orbax-checkpoint", "grain", "transformers"),
    *("tokenizers", "safetensors", "gguf", "ml_collections", "numpy"),
)


def read_config(workdir: Path) -> Config:
    """Returns the configuration that `write_workdir` saved, of earlier code too (`config.complete`).

    Raises:
      UserError: the folder holds none, or it cannot be read.
    """
    from configs import base  # where defaults are born; all else of the product is given them

    file = workdir / "config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise UserError("it holds no configuration.")
        return build(complete(saved, base.get_config(str(saved.get("recipe")))))
    except FileNotFoundError as error:
        rule = "no run was started there; name its --workdir, or train first: python run.py --config FILE"
        raise UserError(f"{file}: missing: {rule}") from error
    except (OSError, ValueError) as error:  # a UserError of build is a ValueError too
        raise UserError(f"{file}: {error} The file must be as training wrote it: restore it.") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON lines file; a last line cut by a crash, and what follows it, is left out."""
    rows = []
    with path.open(encoding="utf-8") as file:  # str.splitlines would cut a text at U+2028
        for line in file:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def load(workdir: str | None, *, verb: str) -> ConfigDict:
    """Returns the saved configuration for a verb that goes on from a run, open to overrides."""
    if verb == "train" or not workdir:
        where = "" if verb == "train" else " or --workdir DIR of a trained run"
        raise UserError(f"--config FILE{where} is needed; the quickest is --config configs/smoke.py.")
    return ConfigDict(dataclasses.asdict(read_config(Path(workdir))))


def check_agreement(cfg: Config, workdir: Path) -> None:
    """Refuses a configuration that means another run than the one already in the folder; an empty folder agrees.

    Raises:
      UserError: names the keys, both values and the remedy.
    """
    if not (workdir / "config.json").exists():
        return
    changes = diff(meaning(read_config(workdir)), meaning(cfg))
    if changes:
        more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
        rule = "it would be another run; keep these values or name another --workdir."
        raise UserError(f"{workdir}: the run there differs in {'; '.join(changes[:3])}{more}: {rule}")


def write_workdir(workdir: Path, *, cfg: Config, base: Mapping[str, Any], command: Sequence[str]) -> None:
    """Writes config.json, config.diff (against `base`), command.txt and versions.json.

    Raises:
      UserError: the folder holds another run, or cannot be written.
    """
    check_agreement(cfg, workdir)
    versions = {"python": platform.python_version()} | {name: _find_version(name) for name in PACKAGES}
    texts = {
        "config.json": json.dumps(to_dict(cfg), indent=2),
        "config.diff": "\n".join(diff(base, to_dict(cfg))),
        "command.txt": shlex.join(command),
        "versions.json": json.dumps(versions, indent=2),
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(workdir / name, text + "\n")
    except OSError as error:
        raise UserError(f"{workdir}: {error.strerror}; the run's folder must be writable: choose --workdir.") from error


def _find_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
