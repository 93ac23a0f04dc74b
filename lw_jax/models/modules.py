"""Flax nnx modules: as pure functions over plain nested dicts, and the two layers that others are made of."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from lw_jax.core.types import Tree
from lw_jax.models import decoder
from lw_jax.models.products import product

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


class Linear(nnx.Linear):
    """Linear layer of nnx, its product by `product`: kernel [in, out], optional bias [out]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to the last axis of x [b m in]."""
        y = product("bmi,io->bmo", x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].reshape(1, 1, -1)
