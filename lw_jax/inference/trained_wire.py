"""Python API of trained wires: `load_wire`. Language models: `language_model.py`."""

import functools
from collections.abc import Iterator, Mapping
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
from lw_jax.data.literals import count_words
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.hub import sources, wire_repository
from lw_jax.inference.answering import (
    SINGLE,
    Answering,
    KVPrompt,
    Questions,
    Several,
    check_questions,
    pair,
    to_host,
)
from lw_jax.inference.coded_wire import CodedWire
from lw_jax.models import codec, wire
from lw_jax.planning import planner
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import run_folder, wire_folder


def load_wire(folder: str | Path, config: Mapping[str, str] | None = None) -> "TrainedWire | CodedWire":
    """Opens the trained wire in a run's folder, an exported wire folder or a repository "owner/name" of the hub.

    `config` replaces values of its configuration, as flags do: {"llms.llama.source": "models/llama"}.
    """
    path = wire_repository.locate(folder)
    values = run_folder.load(path, verb="load_wire")
    config_file.override(values, config or {})
    cfg = build(values)
    validation.validate(cfg)
    run_folder.check_agreement(cfg, path)
    return open_wire(cfg, path)


def open_wire(cfg: Config, path: Path) -> "TrainedWire | CodedWire":
    """Opens a run's best checkpoint (the latest where none was validated) with this configuration.

    A `CodedWire` where its messages are the readers' own keys and values (encoder.kind "cache").
    """
    if cfg.recipe != "latentwire":
        raise UserError(
            f"{path}: a run of recipe {cfg.recipe!r} has no wire; its held-out figures are in metrics.jsonl, and "
            "`python run.py export` writes its weights"
        )
    if wire_folder.is_wire(path):
        wire_folder.check_sources(path, cfg)
    runtime.start_devices()
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    cfg, placement = planner.settle(cfg, reading=True)
    if not cfg.train.steps:
        whole = recipes.make_whole(cfg, placement)
        restored = recipes.read_best(whole, cfg, path)
        return CodedWire(whole, restored.state["trainable"], whole.load_frozen(), restored.step)
    recipe = LatentWire(cfg, placement)
    with phase(f"reading the trained wire in {path}"):
        restored = recipes.read_best(recipe, cfg, path)
    return TrainedWire(recipe, restored.state["trainable"], recipe.load_frozen(), restored.step)


def resolve_channel(
    encoder: Encoder, *, bits: int = 8, slots: int | None = None, width: int | None = None
) -> tuple[int, int, int]:
    """Returns (slots, width, bits) of a message; None takes the encoder's own. Raises UserError for more."""
    if bits not in codec.BITS:
        raise UserError(f"bits={bits}: a value has {', '.join(map(str, codec.BITS))} bits; choose one of them")
    for name, value, most in (("slots", slots, encoder.slots), ("width", width, encoder.width)):
        if value is not None and not 1 <= value <= most:
            raise UserError(
                f"{name}={value}: this wire's encoder has config.encoder.{name}={most}; ask for 1 to {most}"
            )
    return slots or encoder.slots, width or encoder.width, bits


def resolve_literals(cfg: Config, words: int | None) -> int:
    """Returns the words of a text that its message carries; None takes the wire's own. Raises UserError for more."""
    most = cfg.message.literals
    if words is not None and not 0 <= words <= most:
        raise UserError(
            f"literals={words}: this wire's readers know config.message.literals={most}; ask for 0 to {most}"
        )
    return most if words is None else words


class TrainedWire(Answering):
    """A trained encoder and its readers: writes a text into a message, answers questions from a message."""

    functions: WireFunctions

    def __init__(self, recipe: LatentWire, trainable: Tree, frozen: Tree, step: int):
        self.recipe, self.trainable, self.frozen, self.step = recipe, trainable, frozen, step
        self.functions = WireFunctions(recipe.wire, recipe.placement)
        recipe.restore_chooser(trainable)

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
        *,
        question: str = "",
        literals: int | None = None,
    ) -> bytes:
        """Returns the framed message of a text in `slots` latents, the first `width` values of each.

        `slots`: None: as many as the text needs at config.encoder.ratio, or all.
        `literals`: the number of the text's words that go with them (config.message.choice says which); None:
        config.message.literals.
        A wire trained with prompt.question="latents" encodes the question with the text and needs it here.
        """
        in_latents = self.recipe.cfg.prompt.question == "latents"
        if bool(question) != in_latents:
            rule = "needs the question" if in_latents else "takes no question: give it to `read`"
            raise UserError(f"write: question={question!r}: this wire's message {rule} (config.prompt.question)")
        channel = resolve_channel(self.recipe.cfg.encoder, bits=bits, slots=slots, width=width)
        words = resolve_literals(self.recipe.cfg, literals)
        source = batches.encode_prompt(text, question or "?", layout=self.recipe.layout)["source"]
        if slots is None:
            channel = (int(source["channel"][0, 0]), *channel[1:])
        source |= {"channel": np.asarray([channel], np.int32)}
        placed = self._put(source, self.functions.mesh_of(None))
        latents = self.functions.encode(self.trainable, placed, self.frozen.get(SHARED))
        sent = np.asarray(latents[0, : channel[0], : channel[1]])
        chooser = self.recipe.chooser
        chosen = chooser.choose(text.strip(), words) if words and chooser else ()
        return codec.pack(sent, bits=bits, encoder=self.encoder_fingerprint, literals=chosen)

    @overload
    def prefix(self, message: bytes, reader: str) -> np.ndarray: ...
    @overload
    def prefix(self, message: Several, reader: str) -> list[np.ndarray]: ...
    def prefix(self, message: bytes | Several, reader: str) -> np.ndarray | list[np.ndarray]:
        """Returns a message's soft prefix alone, f32 [slots + 1, d]: an embedding of each slot, then the task vector.

        d is the width of the reader's embeddings. Several messages: a list. Literals are not part of it. Raises
        UserError for a wire with adapter.kind="kv", an unknown reader and a message of another encoder.
        """
        self._check_kind("embeddings", "prefix")
        self._check_reader(reader)
        found = []
        for one in (bytes(message),) if isinstance(message, SINGLE) else message:
            frame, latents = self._open(one)
            placed = self._put(latents[None], self.functions.mesh_of(reader))
            made = self.functions.prefix(self.trainable, placed, reader)
            assert isinstance(made, jax.Array), "a wire of embeddings"
            made = to_host(made)[0]
            found.append(np.concatenate([made[: frame.slots], made[-1:]]))
        return found[0] if isinstance(message, SINGLE) else found

    @overload
    def prompt_embeds(self, message: bytes, reader: str, question: str) -> np.ndarray: ...
    @overload
    def prompt_embeds(self, message: bytes | Several, reader: str, question: Questions) -> list[np.ndarray]: ...
    def prompt_embeds(
        self, message: bytes | Several, reader: str, question: str | Questions
    ) -> np.ndarray | list[np.ndarray]:
        """Returns the whole prompt that `read` gives its reader as input embeddings, f32 [t, d], without padding.

        In order: BOS and opening, the prefix, the task vector, literals, question. t is the prompt's number of
        positions, d the width of the reader's embeddings. Several questions (as in `read`): a list of arrays, each of
        its own length. Raises UserError for a wire with adapter.kind="kv", an unknown reader and a message of another
        encoder.
        """
        self._check_kind("embeddings", "prompt_embeds")
        found = []
        for prompt, count in self._prompts(pair(message, question), reader):
            x, mask = to_host(prompt.embeddings), np.asarray(prompt.mask)
            found += [x[row, mask[row]] for row in range(count)]
        return found[0] if isinstance(question, str) else found

    @overload
    def prefix_kv(self, message: bytes, reader: str, question: str) -> KVPrompt: ...
    @overload
    def prefix_kv(self, message: bytes | Several, reader: str, question: Questions) -> list[KVPrompt]: ...
    def prefix_kv(self, message: bytes | Several, reader: str, question: str | Questions) -> KVPrompt | list[KVPrompt]:
        """Returns the keys and values that `read` puts before a reader's prompt, and the embeddings behind them.

        Shapes: `KVPrompt`. Several questions (as in `read`): a list. Raises UserError for a wire with
        adapter.kind="embeddings", an unknown reader and a message of another encoder.
        """
        self._check_kind("kv", "prefix_kv")
        found = self._kv_prompts(self._prompts(pair(message, question), reader), reader)
        return found[0] if isinstance(question, str) else found

    def _check_kind(self, kind: str, name: str) -> None:
        found, other = self.recipe.cfg.adapter.kind, {"kv": "prompt_embeds", "embeddings": "prefix_kv"}[kind]
        if found != kind:
            raise UserError(f"{name}: this wire has config.adapter.kind={found!r}, it needs {kind!r}; call `{other}`")

    def _open(self, message: bytes) -> tuple[codec.Frame, np.ndarray]:
        """Returns a message's frame and its latents, zeros beyond them."""
        encoder = self.recipe.cfg.encoder
        frame = codec.read_frame(message, encoder=self.encoder_fingerprint)
        resolve_channel(encoder, bits=frame.bits, slots=frame.slots, width=frame.width)
        resolve_literals(self.recipe.cfg, count_words(frame.literals))
        latents = np.zeros((encoder.slots, encoder.width), np.float32)
        latents[: frame.slots, : frame.width] = codec.unpack(message, encoder=self.encoder_fingerprint)
        return frame, latents

    def _prompts(self, pairs: list[tuple[bytes, str]], reader: str) -> Iterator[tuple[wire.Prompt, int]]:
        """Yields a reader's prompts on its mesh and how many of their rows are real, config.eval.batch at a time."""
        self._check_reader(reader)
        in_latents = self.recipe.cfg.prompt.question == "latents"
        if not in_latents:
            check_questions(question for _, question in pairs)
        opened = {message: self._open(message) for message in dict.fromkeys(message for message, _ in pairs)}
        if in_latents and len(set(pairs)) > len(opened):
            raise UserError(
                "several questions for one message: this wire encodes the question with the text "
                "(config.prompt.question='latents'); write a message for each question"
            )
        literals = {message: frame.literals for message, (frame, _) in opened.items()}
        mesh = self.functions.mesh_of(reader)
        for part, rows in self._parts(pairs):
            asked = [Example(question, "?", question or "?", (), literals[message]) for message, question in part]
            batch = batches.encode_prompts(asked, layout=self.recipe.layout)
            frames, latents = zip(*(opened[message] for message, _ in part), strict=True)
            channel = np.asarray([(frame.slots, frame.width, frame.bits) for frame in frames], np.int32)
            fields = self._put(batch["readers"][reader] | {"channel": channel}, mesh, rows)
            placed = self._put(np.stack(latents), mesh, rows)
            params = self.frozen[reader]
            yield self.functions.prompt_from_latents(self.trainable, params, fields, placed, reader), len(part)
