"""Python API of trained wires: `load_wire`. Language models: `language_model.py`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import jax
import numpy as np

from lw_jax import recipes
from lw_jax.core import config_file, runtime, tree, validation
from lw_jax.core.config import Config, Encoder, build
from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase
from lw_jax.core.types import SHARED, Example, Tree
from lw_jax.data import batches
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.hub import sources, wire_repository
from lw_jax.inference.answering import SINGLE, Answering, Questions, Several, pair, to_host
from lw_jax.inference.coded_wire import CodedWire
from lw_jax.models import codec, wire
from lw_jax.planning import planner
from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import run_folder, wire_folder


def load_wire(
    folder: str | Path, config: Mapping[str, object] | None = None, readers: Sequence[str] = ()
) -> "TrainedWire | CodedWire":
    """Opens the trained wire in a run's folder, an exported wire folder or a repository "owner/name" of the hub.

    `config` replaces values of its configuration, as flags do: {"data.context_tokens": 2048}. `readers`: see
    `open_wire`.
    """
    path = wire_repository.locate(folder)
    values = run_folder.load(path, verb="load_wire")
    config_file.override(
        values,
        {path: str(tuple(value) if isinstance(value, list) else value) for path, value in (config or {}).items()},
    )
    cfg = build(values)
    validation.validate(cfg)
    run_folder.check_agreement(cfg, path)
    if readers and not wire_folder.is_wire(path):
        raise UserError(
            f"{path}: readers={list(readers)}: a run is opened with all of its readers; export it, and open that"
        )
    return open_wire(cfg, path, readers)


def open_wire(cfg: Config, path: Path, readers: Sequence[str] = ()) -> "TrainedWire | CodedWire":
    """Opens a run's best checkpoint (the latest where none was validated) with this configuration.

    A `CodedWire` where its messages are the readers' own keys and values (encoder.kind "cache"). Of an exported wire
    the models of other readers than `readers` are neither downloaded nor loaded; none named: all are.
    """
    if unknown := [name for name in readers if name not in cfg.llms]:
        raise UserError(f"reader {unknown[0]!r}: unknown; known: {', '.join(cfg.llms)}")
    if cfg.recipe != "latentwire":
        raise UserError(
            f"{path}: a run of recipe {cfg.recipe!r} has no wire; its held-out figures are in metrics.jsonl, and "
            "`python run.py export` writes its weights"
        )
    if wire_folder.is_wire(path):
        cfg = dataclasses.replace(cfg, llms={name: cfg.llms[name] for name in readers or cfg.llms})
        wire_folder.check_sources(path, cfg)
    runtime.start_devices()
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    cfg, placement = planner.resolve_auto(cfg, reading=True)
    recipe = recipes.kind_of(cfg)(cfg, placement)
    assert isinstance(recipe, LatentWire | CacheWire), "of a wire"
    with phase(f"reading the trained wire in {path}"):
        restored = recipes.read_best(recipe, cfg, path)
    weights = restored.state["trainable"], recipe.load_frozen(), restored.step
    return CodedWire(recipe, *weights) if isinstance(recipe, CacheWire) else TrainedWire(recipe, *weights)


def resolve_channel(
    encoder: Encoder, *, bits: int = 8, slots: int | None = None, width: int | None = None
) -> tuple[int, int, int]:
    """Returns (slots, width, bits) of a message; None takes the encoder's own. Raises UserError for more."""
    if bits not in codec.BITS:
        raise UserError(f"bits={bits}: a value has {', '.join(map(str, codec.BITS))} bits; choose one of them")
    for name, value, most in (("slots", slots, encoder.slots), ("width", width, encoder.width)):
        if value is not None and value not in range(1, most + 1):
            raise UserError(
                f"{name}={value}: this wire's encoder has config.encoder.{name}={most}; ask for 1 to {most}"
            )
    return int(slots or encoder.slots), int(width or encoder.width), int(bits)


class TrainedWire(Answering):
    """A trained encoder and its readers: writes a text into a message, answers questions from a message."""

    functions: WireFunctions

    def __init__(self, recipe: LatentWire, trainable: Tree, frozen: Tree, step: int):
        self.recipe, self.trainable, self.frozen, self.step = recipe, trainable, frozen, step
        self.functions = WireFunctions(recipe.wire, recipe.placement)

    @functools.cached_property
    def encoder_fingerprint(self) -> str:
        """16 hex digits of the encoder's trained weights; a message carries them."""
        return tree.digest(self.trainable["encoder"])[:16]

    def write(
        self,
        text: str,
        bits: int = 8,
        slots: int | None = None,
        width: int | None = None,
    ) -> bytes:
        """Returns the framed message of a text in `slots` latents, the first `width` values of each.

        `slots`: None: as many as the text needs at config.encoder.ratio, or all.
        """
        channel = resolve_channel(self.recipe.cfg.encoder, bits=bits, slots=slots, width=width)
        source = batches.encode_prompt(text, "?", layout=self.recipe.layout)["source"]
        if slots is None:
            channel = (int(source["channel"][0, 0]), *channel[1:])
        source |= {"channel": np.asarray([channel], np.int32)}
        placed = self._put(source, None)
        latents = self.functions.encode(self.trainable, placed, self.frozen.get(SHARED))
        sent = np.asarray(latents[0, : channel[0], : channel[1]])
        return codec.pack(sent, bits=bits, encoder=self.encoder_fingerprint)

    @overload
    def prefix(self, message: bytes, reader: str) -> np.ndarray: ...
    @overload
    def prefix(self, message: Several, reader: str) -> list[np.ndarray]: ...
    def prefix(self, message: bytes | Several, reader: str) -> np.ndarray | list[np.ndarray]:
        """Returns a message's soft prefix alone, f32 [slots + 1, d]: an embedding of each slot, then the task vector.

        d is the width of the reader's embeddings. Several messages: a list. Raises UserError for a wire with
        adapter.kind="kv", an unknown reader and a message of another encoder.
        """
        self._check_kind("embeddings", "prefix")
        self._check_reader(reader)
        prefixes = []
        for framed in (message,) if isinstance(message, SINGLE) else message:
            frame, latents = self._open(bytes(framed), reader)
            placed = self._put(latents[None], reader)
            prefix = self.functions.prefix(self.trainable, placed, reader)
            assert isinstance(prefix, jax.Array), "a wire of embeddings"
            prefix = to_host(prefix)[0]
            prefixes.append(np.concatenate([prefix[: frame.slots], prefix[-1:]]))
        return prefixes[0] if isinstance(message, SINGLE) else prefixes

    @overload
    def prompt_embeds(self, message: bytes, reader: str, question: str) -> np.ndarray: ...
    @overload
    def prompt_embeds(self, message: bytes | Several, reader: str, question: Questions) -> list[np.ndarray]: ...
    def prompt_embeds(
        self, message: bytes | Several, reader: str, question: str | Questions
    ) -> np.ndarray | list[np.ndarray]:
        """Returns the whole prompt that `read` gives its reader as input embeddings, f32 [t, d], without padding.

        In order: BOS and opening, the prefix, the task vector, question. t is the prompt's number of
        positions, d the width of the reader's embeddings. Several questions (as in `read`): a list of arrays, each of
        its own length. Raises UserError for a wire with adapter.kind="kv", an unknown reader and a message of another
        encoder.
        """
        self._check_kind("embeddings", "prompt_embeds")
        embeddings = []
        for prompt, count in self._prompts(pair(message, question), reader):
            x, mask = to_host(prompt.embeddings), np.asarray(prompt.mask)
            embeddings += [x[row, mask[row]] for row in range(count)]
        return embeddings[0] if isinstance(question, str) else embeddings

    def _check_kind(self, kind: str, name: str) -> None:
        actual, other = self.recipe.cfg.adapter.kind, {"kv": "prompt_embeds", "embeddings": "prefix_kv"}[kind]
        if actual != kind:
            raise UserError(f"{name}: this wire has config.adapter.kind={actual!r}, it needs {kind!r}; call `{other}`")

    def _open(self, message: bytes, reader: str, *, whole: bool = False) -> tuple[codec.Frame, np.ndarray]:
        """Returns a message's frame and its latents f32 [m z], zeros beyond its own, the same for all readers."""
        del reader
        if whole:
            self._check_kind("kv", "prefix_kv")
        encoder = self.recipe.cfg.encoder
        frame = codec.read_frame(message, encoder=self.encoder_fingerprint)
        resolve_channel(encoder, bits=frame.bits, slots=frame.slots, width=frame.width)
        latents = np.zeros((encoder.slots, encoder.width), np.float32)
        latents[: frame.slots, : frame.width] = codec.unpack(message, encoder=self.encoder_fingerprint)
        return frame, latents

    def prompt(
        self,
        opened: list[tuple[codec.Frame, np.ndarray]],
        questions: list[str],
        reader: str,
        rows: int = 1,
        *,
        whole: bool = False,
    ) -> wire.Prompt:
        del whole  # every head has all keys
        examples = [Example(question, "?", question, ()) for question in questions]
        batch = batches.encode_prompts(examples, layout=self.recipe.layout)
        channel = np.asarray([(frame.slots, frame.width, frame.bits) for frame, _ in opened], np.int32)
        fields = self._put(batch["readers"][reader] | {"channel": channel}, reader, rows)
        placed = self._put(np.stack([latents for _, latents in opened]), reader, rows)
        return self.functions.prompt_from_latents(self.trainable, self.frozen[reader], fields, placed, reader)
