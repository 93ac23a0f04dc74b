"""Flax nnx modules as pure functions over plain nested dicts: the one place that splits and merges."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from lw_jax.core.types import Tree
from lw_jax.models import decoder

M = TypeVar("M", bound=nnx.Module)


class Pure(Generic[M]):
    """Functional view of a module: `init(key)` gives a dict of arrays, `bind(params)` a module that computes with it.

    Example: `Pure(Adapter, 256, 2048, 576)`.
    """

    def __init__(self, kind: Callable[..., M], *sizes: Hashable, **settings: Hashable):
        self._make = functools.partial(kind, *sizes, **settings)
        self._graph = _graph_of(kind, sizes, tuple(settings.items()))

    def init(self, key: jax.Array) -> Tree:
        """Draws the parameters; call it inside jit."""
        return nnx.to_pure_dict(nnx.state(self._make(rngs=nnx.Rngs(key)), nnx.Param))

    def bind(self, params: Tree) -> M:
        return nnx.merge(self._graph, nnx.State(params))


@functools.cache  # a pass asks for it each time it is traced
def _graph_of(kind: Callable, sizes: tuple, settings: tuple) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: kind(*sizes, **dict(settings), rngs=nnx.Rngs(0))))


class RMSNorm(nnx.Module):
    """The decoder's RMSNorm as a module; flax's own promotes bf16 implicitly, which the tests refuse."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones((width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return decoder.rms_norm(x, self.scale[...], 1e-6)
