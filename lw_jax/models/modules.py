"""Flax nnx modules as pure functions over plain nested dicts: the one place that splits and merges."""

from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from lw_jax.core.types import Tree
from lw_jax.models import decoder

M = TypeVar("M", bound=nnx.Module)


class Pure(Generic[M]):
    """Functional view of a module: `init(key)` gives a dict of arrays, `bind(params)` a module that computes with it.

    Example: `Pure(lambda rngs: Adapter(256, 2048, 576, rngs=rngs))`.
    """

    def __init__(self, make: Callable[[nnx.Rngs], M]):
        self._make = make
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(self, key: jax.Array) -> Tree:
        """Draws the parameters; call it inside jit."""
        return nnx.to_pure_dict(nnx.state(self._make(nnx.Rngs(key)), nnx.Param))

    def bind(self, params: Tree) -> M:
        return nnx.merge(self._graph, nnx.State(params))


class RMSNorm(nnx.Module):
    """The decoder's RMSNorm as a module; flax's own promotes bf16 implicitly, which the tests refuse."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones((width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return decoder.rms_norm(x, self.scale[...], 1e-6)
