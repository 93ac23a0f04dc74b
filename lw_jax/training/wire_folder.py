"""Wire folder: a trained wire alone, to hand on. config.json says what it is, wire.safetensors holds its arrays.

It comes from outside and is never written to after it was made. Light at import; the arrays: `wire_tensors`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lw_jax.core import config, schema, validation
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.files import expand

CONFIG, TENSORS, CARD = "config.json", "wire.safetensors", "README.md"
FORMAT, VERSION = "latentwire", 1
READERS = "llms/"  # before a reader's name in `WireFolder.models`
BODY = "encoder"  # the encoder's body in `WireFolder.models`
REMEDY = "copy the folder anew, or export the wire again"

DType = Literal["bf16", "int8", "fp32"]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Short = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Word = Annotated[str, msgspec.Meta(max_length=10_000)]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pretrained model that the wire belongs to."""

    source: _Word  # as the run's configuration names it
    local: bool  # a folder or file of the machine that exported
    fingerprint: _Short  # of configuration and weights, `hub.weights.fingerprint`
    sha256: dict[_Word, _Hash]  # by name of weight file
    tokenizer: _Short  # `data.tokens.identify`


class Tensors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What wire.safetensors must be."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    sha256: _Hash


class WireFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of config.json."""

    format: Literal["latentwire"]
    version: Literal[1]
    made_by: _Word  # version of the program
    step: schema.Index  # of the checkpoint
    dtype: DType  # of matrices; small arrays are fp32
    tensors: Tensors
    models: dict[_Word, Model]
    configuration: dict[str, Any]  # the run's own, whole


class _Header(msgspec.Struct, frozen=True):
    """Fields of config.json that tell a wire folder of any version from a run's folder."""

    format: Any = None
    version: Any = None


def is_wire(folder: Path) -> bool:
    """Returns whether a folder is an exported wire, damaged or not, and not a run's folder."""
    if (folder / TENSORS).exists():
        return True
    try:
        return schema.read(folder / CONFIG, _Header, remedy="").format is not None
    except (FileNotFoundError, UserError):  # a run's config.json is judged by its own reader
        return False


def read(folder: Path) -> WireFolder:
    """Returns what config.json says of the wire.

    Raises:
      UserError: it is missing, of another format or version, or damaged.
    """
    file = folder / CONFIG
    try:
        header = schema.read(file, _Header, remedy=REMEDY)
        if header.format != FORMAT:
            raise UserError(f"{file}: format={header.format!r:.80}: {FORMAT!r} is read; {REMEDY}")
        if header.version != VERSION or header.version is True:
            rule = f"this program reads version {VERSION}; use the program that wrote it"
            raise UserError(f"{file}: version={header.version!r:.80}: {rule}")
        return schema.read(file, WireFolder, remedy=REMEDY)
    except FileNotFoundError as error:
        raise UserError(f"{file}: missing: a wire folder has {CONFIG} and {TENSORS}; {REMEDY}") from error


def read_config(folder: Path) -> Config:
    """Returns the configuration of the run that made the wire; raises UserError as `read`, or for a bad value."""
    file, saved = folder / CONFIG, read(folder).configuration
    try:
        cfg = config.build(saved)
        validation.validate(cfg)
    except ValueError as error:  # a UserError is one too
        raise UserError(f"{file}: configuration: {str(error).rstrip('.')}; {REMEDY}") from error
    if cfg.recipe != "latentwire":
        raise UserError(f"{file}: configuration.recipe={cfg.recipe!r}: a wire's is 'latentwire'; {REMEDY}")
    return cfg


def check_sources(folder: Path, cfg: Config) -> None:
    """Refuses a configuration that still names a folder of the machine that exported, where it is not here."""
    for name, model in read(folder).models.items():
        source = source_of(cfg, name)
        if model.local and source == model.source and not expand(source).exists():
            rule = f"{label(name)} is a folder of the machine that exported it, {source!r}, which is not here"
            raise UserError(f"{folder}: {rule}; name where you have it: {flag(name)}FOLDER")


def source_of(cfg: Config, name: str) -> str:
    """Returns the source that a configuration gives for a model of `WireFolder.models`; empty where it knows none."""
    llm = cfg.llms.get(name.removeprefix(READERS))
    return cfg.encoder.source if name == BODY else llm.source if llm else ""


def label(name: str) -> str:
    return "the encoder's body" if name == BODY else f"reader {name.removeprefix(READERS)!r}"


def flag(name: str) -> str:
    return f"--config.{name.replace('/', '.')}.source="
