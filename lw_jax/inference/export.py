"""Export of trained weights: wire folder, PEFT adapter, merged model, TTT model folder."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec

from lw_jax import recipes
from lw_jax.core import config, schema
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.files import expand, whole
from lw_jax.core.types import Tree
from lw_jax.core.version import __version__
from lw_jax.hub import peft, weights
from lw_jax.inference import language_model
from lw_jax.models import lora
from lw_jax.recipes import wire_models
from lw_jax.recipes.dpo import DPO
from lw_jax.training import run_folder, wire_folder, wire_tensors
from lw_jax.training.run_folder import check_writable
from lw_jax.training.wire_folder import DType, WireFolder
from sharding import placement

FLAGS = {"dpo": ("peft", "merged"), "ttt": ("model",), "latentwire": ("wire",)}  # by recipe
LOCK = ".export.lock"  # in a folder that is being written
MOST_BYTES = 8_000_000  # of a wire that is easily handed on
MOST_CACHE_BYTES = 32_000_000  # the same of encoder.kind "cache", whose bases are wide
Card = Callable[[WireFolder, Mapping[str, int]], str]  # of the wire and the bytes of its parts


def export(
    cfg: Config, workdir: Path, folders: Mapping[str, Path], *, dtype: DType | None = None, card: Card | None = None
) -> Iterator[str]:
    """Writes a run's best checkpoint (the latest where none was validated) to folders by flag.

    `dtype` and `card` are of a wire; None: bf16, of encoder.kind "cache" int8. Yields a line for each folder.

    Raises:
        UserError: a flag that the recipe does not have, a folder that is not writable, not empty (an earlier wire is
            replaced) or written to by another process, or no checkpoint yet.
    """
    known = FLAGS[cfg.recipe]
    if unknown := sorted(folders.keys() - set(known)):
        rule = f"takes {' and '.join(f'--{flag}' for flag in known)}"
        raise UserError(f"{workdir}: --{unknown[0]}: a run of recipe {cfg.recipe!r} {rule}")
    sources = (*(llm.source for llm in cfg.llms.values()), cfg.encoder.source, cfg.encoder.run, cfg.ttt.source)
    used = [workdir, *(expand(source) for source in sources if source)]
    for flag, folder in folders.items():
        check_writable(folder, remedy=f"choose another folder for --{flag}")
        _check_unused(flag, folder, used=used)
    if len({folder.resolve() for folder in folders.values()}) < len(folders):
        flags = " and ".join(f"--{flag}" for flag in folders)
        raise UserError(f"{next(iter(folders.values()))}: named by {flags}; name a folder for each")
    with contextlib.ExitStack() as locks:
        for flag, folder in folders.items():
            run_folder.lock(folder, LOCK, flag=f"--{flag}")
            locks.callback((folder / LOCK).unlink, missing_ok=True)  # its own: another process' lock stays
            _check_empty(flag, folder)
        yield from _write(cfg, workdir, folders, dtype=dtype, card=card)


def _write(
    cfg: Config, workdir: Path, folders: Mapping[str, Path], *, dtype: DType | None, card: Card | None
) -> Iterator[str]:
    if cfg.recipe == "latentwire":
        assert card is not None
        default: DType = "int8" if cfg.encoder.kind == "cache" else "bf16"
        yield from _export_wire(cfg, workdir, folders["wire"], dtype=dtype or default, card=card)
        return
    if cfg.recipe == "ttt":
        lm = language_model.load_trained(cfg, workdir)
        lm.save(folders["model"])
        yield f"step {lm.step}: model and tokenizer, fp32, in {folders['model']}"
        return
    recipe = DPO(cfg, placement.place("single", recipes.reader_bytes(cfg)))
    restored = recipes.read_best(recipe, cfg, workdir)
    pairs, model_type = restored.state["trainable"], weights.model_type(recipe.location)
    if "peft" in folders:
        peft.save(folders["peft"], pairs, recipe.lora, cfg=recipe.model, model_type=model_type, base=recipe.llm.source)
        yield f"step {restored.step}: adapter for {recipe.llm.source} in {folders['peft']}"
    if "merged" in folders:
        save_merged(folders["merged"], recipe, pairs, model_type)
        yield f"step {restored.step}: whole model, bf16, in {folders['merged']}"


def _check_unused(flag: str, folder: Path, *, used: list[Path]) -> None:
    """Refuses a folder that the run needs."""
    if folder.is_dir() and any(path.exists() and path.samefile(folder) for path in used):
        raise UserError(f"{folder}: the run needs this folder and its files; name a new one for --{flag}")


def _check_empty(flag: str, folder: Path) -> None:
    """Refuses a folder that is not empty: only an earlier wire is known as such."""
    if any(path.name != LOCK for path in folder.iterdir()) and not (flag == "wire" and wire_folder.is_wire(folder)):
        raise UserError(f"{folder}: it is not empty; name a new folder for --{flag}, or remove this one")


def _export_wire(cfg: Config, workdir: Path, folder: Path, *, dtype: DType, card: Card) -> Iterator[str]:
    """Writes a wire folder (`training.wire_folder`); yields its size and what someone else must bring.

    A wire that the folder holds is replaced once the new one is written whole. Raises UserError for a value that is not
    finite.
    """
    placed = placement.place("single", recipes.reader_bytes(cfg))
    recipe = recipes.kind_of(cfg)(cfg, placed)
    restored = recipes.read_best(recipe, cfg, workdir)
    trainable, models = restored.state["trainable"], wire_models.describe(cfg)
    sizes = wire_tensors.part_bytes(trainable, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    meta, described, tensors = (folder / name for name in (wire_folder.CONFIG, wire_folder.CARD, wire_folder.TENSORS))
    # All three take their places at the end, config.json last: its hash refuses the arrays of another wire.
    with whole(meta) as new_meta, whole(described) as new_described, whole(tensors) as new_tensors:
        wire = WireFolder(
            format=wire_folder.FORMAT,
            version=wire_folder.VERSION,
            made_by=__version__,
            step=restored.step,
            dtype=dtype,
            tensors=wire_tensors.write(new_tensors, trainable, dtype),
            models=models,
            configuration=config.to_dict(cfg),
        )
        new_described.write_text(card(wire, sizes), encoding="utf-8")
        new_meta.write_text(json.dumps(msgspec.to_builtins(wire), indent=2) + "\n", encoding="utf-8")
    parts = ", ".join(f"{name} {size / 1e6:,.2f}" for name, size in sizes.items())
    yield f"step {wire.step}: wire of {wire.tensors.bytes / 1e6:,.2f} MB ({parts}), {dtype}, in {folder}"
    largest = next(iter(sizes))
    if cfg.encoder.kind == "cache":
        if wire.tensors.bytes > MOST_CACHE_BYTES:
            width = cfg.encoder.width * MOST_CACHE_BYTES // wire.tensors.bytes
            limit = f"over {MOST_CACHE_BYTES / 1e6:,.0f} MB: a start with encoder.width={width} at most would be below"
            yield f"{limit}{'' if wire.dtype == 'int8' else ', and --dtype int8 is a half or a fourth of this'}"
    elif wire.tensors.bytes > MOST_BYTES:
        body = (
            ": the encoder's whole body was trained and is in it; encoder.rank trains small pairs instead"
            if largest == "encoder/body"
            else ""
        )
        yield f"over {MOST_BYTES / 1e6:,.0f} MB: {largest} has {sizes[largest] / 1e6:,.2f} of them{body}"
    for name, model in models.items():
        if model.local:
            where = f"is a folder of this machine, {model.source!r}, and not in the wire"
            yield f"{wire_folder.label(name)} {where}: elsewhere it is named by {wire_folder.flag(name)}FOLDER"


def save_merged(folder: Path, recipe: DPO, pairs: Tree, model_type: str) -> None:
    """Writes the model with its LoRA pairs merged in, bf16; AWQ matrices are unpacked first.

    Its own settings of generation go with it, and the ids at which ours ends.
    """
    packed = "awq" if recipe.llm.weights == "awq" else ""
    params = weights.load(recipe.location, dtype=jnp.bfloat16, packed=packed)
    params = lora.merge(lora.unpack(params, recipe.model, jnp.bfloat16), pairs, recipe.lora)
    words, stated = recipe.tokenizer, recipe.location / "generation_config.json"
    own = schema.read(stated, dict[str, Any], remedy="fetch the file again") if stated.is_file() else {}
    generation = own | {"eos_token_id": list(words.stops)}
    weights.save(folder, params, recipe.model, model_type=model_type, tokenizer=words.backend, generation=generation)
