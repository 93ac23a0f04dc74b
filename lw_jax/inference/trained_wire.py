"""Python API of trained wires: `load_wire`. Language models: `language_model.py`."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lw_jax import recipes
from lw_jax.core import runtime, tree
from lw_jax.core.config import Config, Encoder
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.data import batches
from lw_jax.data.literals import count_words
from lw_jax.evals import answers
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.hub import sources
from lw_jax.models import codec, wire
from lw_jax.planning import planner
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import run_folder
from sharding import place


def load_wire(folder: str | Path) -> "TrainedWire":
    """Opens the trained wire in a run's folder."""
    path = Path(folder)
    return open_wire(run_folder.read_config(path), path)


def open_wire(cfg: Config, path: Path) -> "TrainedWire":
    """Opens a run's best checkpoint (the latest where none was validated) with this configuration."""
    if cfg.recipe != "latentwire":
        raise UserError(
            f"{path}: a run of recipe {cfg.recipe!r} has no wire; its held-out figures are in metrics.jsonl, and "
            "`python run.py export` writes its weights"
        )
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    cfg, placement = planner.settle(cfg, reading=True)
    recipe = LatentWire(cfg, placement)
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


class TrainedWire:
    """A trained encoder and its readers: writes a text into a message, answers questions from a message."""

    def __init__(self, recipe: LatentWire, trainable: Tree, frozen: Tree, step: int):
        self.recipe, self.trainable, self.frozen, self.step = recipe, trainable, frozen, step
        self.functions = WireFunctions(recipe.wire, recipe.placement)

    @functools.cached_property
    def encoder_fingerprint(self) -> str:
        """16 hex digits of the encoder's weights; a message carries them."""
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
        `literals`: the number of the text's words that go with them, those that the encoder finds least predictable;
        None: config.message.literals.
        A wire trained with prompt.question="latents" encodes the question with the text and needs it here.
        """
        in_latents = self.recipe.cfg.prompt.question == "latents"
        if bool(question) != in_latents:
            rule = "needs the question" if in_latents else "takes no question: give it to `read`"
            raise UserError(f"write: question={question!r}: this wire's message {rule} (config.prompt.question)")
        channel = resolve_channel(self.recipe.cfg.encoder, bits=bits, slots=slots, width=width)
        words = resolve_literals(self.recipe.cfg, literals)
        source = self._batch(text, question or "?")["source"]
        if slots is None:
            channel = (int(source["channel"][0, 0]), *channel[1:])
        source |= {"channel": np.asarray([channel], np.int32)}
        latents = self.functions.encode(self.trainable, self._put(source, self.functions.mesh_of(None)))
        sent = np.asarray(latents[0, : channel[0], : channel[1]])
        chosen = self.recipe.surprisal.choose(text.strip(), words) if words else ()
        return codec.pack(sent, bits=bits, encoder=self.encoder_fingerprint, literals=chosen)

    def read(self, message: bytes, reader: str, question: str) -> str:
        """Returns a reader's answer from a message alone, with the literals that it carries."""
        encoder = self.recipe.cfg.encoder
        frame = codec.read_frame(message, encoder=self.encoder_fingerprint)
        channel = resolve_channel(encoder, bits=frame.bits, slots=frame.slots, width=frame.width)
        resolve_literals(self.recipe.cfg, count_words(frame.literals))
        latents = np.zeros((1, encoder.slots, encoder.width), np.float32)
        latents[0, : frame.slots, : frame.width] = codec.unpack(message, encoder=self.encoder_fingerprint)
        fields, params = self._fields(reader, "?", question, literals=frame.literals)
        mesh = self.functions.mesh_of(reader)
        fields |= self._put({"channel": np.asarray([channel], np.int32)}, mesh)
        prompt = self.functions.prompt_from_latents(self.trainable, params, fields, self._put(latents, mesh), reader)
        return self._answer(reader, prompt)

    def read_text(self, text: str, reader: str, question: str) -> str:
        """Returns a reader's answer from the text itself."""
        fields, params = self._fields(reader, text, question, rows=("text",))
        return self._answer(reader, self.functions.prompt_from_text(params, fields["text"]))

    def _fields(self, reader: str, text: str, question: str, **given: Any) -> tuple[Tree, Tree]:
        if reader not in self.frozen:
            raise UserError(f"reader {reader!r}: this wire has {', '.join(self.frozen)}")
        mesh = self.functions.mesh_of(reader)
        return self._put(self._batch(text, question, **given)["readers"][reader], mesh), self.frozen[reader]

    def _batch(self, text: str, question: str, **given: Any) -> batches.Batch:
        return batches.encode_prompt(text, question, layout=self.recipe.layout, **given)

    def _put(self, host: Tree, mesh: Mesh) -> Tree:
        """Places one example, repeated until the data axis divides it."""
        count = self.recipe.placement.data
        return place.put_eval(jax.tree.map(lambda leaf: np.repeat(leaf, count, axis=0), host), mesh)

    def _answer(self, reader: str, prompt: wire.Prompt) -> str:
        ids = self.functions.generate(self.frozen[reader], prompt, reader, self.recipe.cfg.eval.max_new_tokens)
        tokens = [int(token) for token in np.asarray(ids)[0] if token >= 0]
        return answers.first_line(self.recipe.tokenizers[reader].decode(tokens))
