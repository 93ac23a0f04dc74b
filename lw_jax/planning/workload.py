"""Shapes of the inputs of encoding and decoding at the configuration's limits, their FLOPs and least memory traffic."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax import recipes
from lw_jax.core import config, tree
from lw_jax.core.config import Config
from lw_jax.core.precision import of, of_reader
from lw_jax.core.types import SHARED, Tree
from lw_jax.models import decoder
from lw_jax.models.decoder import KVPrefix
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import step_costs
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.traced_costs import trace
from sharding import place


class PromptShapes(NamedTuple):
    """The fields of a `models.wire.Prompt` as shapes with shardings, to be made one inside a traced function."""

    embeddings: Any
    mask: Any
    shared_prefix: None = None  # `WireFunctions` puts what stands before every message among its keys and values
    kv_prefix: KVPrefix | None = None

    @property
    def positions(self) -> int:
        return self.mask.shape[1] + (0 if self.kv_prefix is None else self.kv_prefix.mask.shape[1])


def texts(recipe: LatentWire) -> Tree:
    """Returns a batch of texts that fill the encoder's window, as shapes where they are read."""
    batch, tokens = _batch(recipe), recipe.cfg.encoder.window * recipe.cfg.encoder.windows
    sizes = {"ids": ((batch, tokens), "int32"), "mask": ((batch, tokens), "bool"), "channel": ((batch, 3), "int32")}
    return {name: row_shapes(shape, dtype, recipe.placement.learner) for name, (shape, dtype) in sizes.items()}


def prompts(recipe: LatentWire, name: str, rows: int = 0) -> PromptShapes:
    """Returns `rows` questions from latents at the limits, as shapes where the reader lies; 0: a batch of answers."""
    fields = recipe.validation_widths()["readers"][name]  # maybe a passage's, which has no question
    before, after = fields["before"]["ids"].shape[0], recipe.cfg.data.question_tokens
    rows, slots = rows or _batch(recipe), recipe.cfg.encoder.slots
    if recipe.wire.readers[name].kind == "embeddings":
        return text_prompts(recipe, name, rows, before + slots + 1 + after)
    model, mesh = recipe.wire.readers[name].config, recipe.placement.readers[name].mesh
    dtype = recipe.abstract.frozen[name]["embed"].dtype
    split = recipe.placement.readers[name].table == "tensor" and model.kv_heads % mesh.shape["model"] == 0
    sharding = NamedSharding(mesh, P(None, "data", None, "model" if split else None))
    shape = (model.layers, rows, before + slots, model.kv_heads, model.head_dim)
    kv: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return PromptShapes(
        row_shapes((rows, 1 + after, model.width), dtype, mesh),
        row_shapes((rows, 1 + after), "bool", mesh),
        None,
        KVPrefix(kv, kv, row_shapes((rows, before + slots), "bool", mesh)),
    )


def text_prompts(recipe: LatentWire, name: str, rows: int, length: int) -> PromptShapes:
    """Returns prompts of so many positions, all of them embeddings, as shapes."""
    mesh, table = recipe.placement.readers[name].mesh, recipe.abstract.frozen[name]["embed"]
    shape = rows, length, recipe.wire.readers[name].config.width
    return PromptShapes(row_shapes(shape, table.dtype, mesh), row_shapes(shape[:2], "bool", mesh))


def _batch(recipe: LatentWire) -> int:
    return place.round_up(recipe.cfg.eval.batch, recipe.placement.data)


def row_shapes(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, P("data")))


def step_flops(cfg: Config) -> float:
    """Returns the model's arithmetic in one step of all devices, nothing counted twice."""
    cfg = config.with_remat(cfg, "none")
    recipe = recipes.outline(cfg)
    costs = step_costs.of(StepSpec(cfg, recipe), recipe.batch_widths(), cfg.train.global_batch)
    return sum(part.flops for part in costs.values())


def encode_flops(recipe: LatentWire) -> float:
    weights = recipe.abstract
    return trace(recipe.wire.encode, weights.trainable, texts(recipe), weights.frozen.get(SHARED)).flops


def token_bytes(params: Tree, model: decoder.DecoderConfig, prompt: PromptShapes, tokens: int) -> float:
    """Returns the bytes that the next token of every row needs: all weights but a lookup's table, and the cache."""
    looked_up = 0 if model.tied else tree.nbytes(params["embed"])
    cache = cache_bytes(model, len(prompt.mask), prompt.positions + tokens, prompt.embeddings.dtype)
    return tree.nbytes(params) - looked_up + cache


def cache_bytes(model: decoder.DecoderConfig, rows: int, slots: int, dtype: jnp.dtype) -> int:
    return 2 * model.layers * rows * slots * model.kv_heads * model.head_dim * dtype.itemsize


def arithmetic(cfg: Config, platform: str) -> str:
    """Returns JAX's name of the type of most products' factors: the narrowest that a reader has beside 8 bits."""
    readers = [of_reader(llm.weights, cfg.compute.dtype, platform) for llm in cfg.llms.values()]
    precisions = readers or [of(cfg.compute.dtype, platform)]
    return min((precision.factors for precision in precisions), key=lambda name: jnp.dtype(name).itemsize)
