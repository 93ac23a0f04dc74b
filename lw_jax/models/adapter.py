"""Latents to the soft prefix of one reader: embeddings, or keys and values of all its layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lw_jax.core.types import TASKS, Tree
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.modules import Linear, Pure, RMSNorm


class Adapter(nnx.Module):
    """RMSNorm, two linear layers with GELU between, a linear path beside them, and one gain for the output's size.

    The gain, not the matrix, carries the reader's embedding size (0.01 for Llama-3.1-8B, 0.13 for SmolLM2): rescaling
    the matrix would make Adam's step a hundred times too large for it.
    """

    def __init__(self, width: int, hidden: int, out: int, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(width)
        self.up = Linear(width, hidden, rngs=rngs)
        self.down = Linear(hidden, out, rngs=rngs)
        self.skip = Linear(width, out, use_bias=False, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(()))
        self.tasks = nnx.Param(jax.random.normal(rngs.params(), (len(TASKS), out)))

    def __call__(self, latents: Float[Array, "b m z"], task: str) -> Float[Array, "b n d"]:
        """Returns prefix embeddings and, behind them, the vector that names the task: n = m + 1."""
        y = self.skip(latents) + self.down(jax.nn.gelu(self.up(self.norm(latents))))
        vector = self.tasks[...][TASKS.index(task)].astype(y.dtype)
        vectors = jnp.broadcast_to(vector[None, None, :], (y.shape[0], 1, y.shape[2]))
        return jnp.concatenate([y, vectors], axis=1) * self.gain[...].astype(y.dtype)


class KeysValues(NamedTuple):
    """A prefix as keys, not rotated, and values of all layers, and the task's vector, which stands behind it."""

    k: Float[Array, "l b m k e"]
    v: Float[Array, "l b m k e"]
    task: Float[Array, "b 1 d"]


class KVAdapter(nnx.Module):
    """Two linear layers with GELU, added to the latents; then one linear layer to all keys and values.

    `gain` [l 2] carries each layer's size of keys and of values, in which the kernel and the bias are measured: so one
    learning rate serves keys of size 10 and values of size 0.1.
    """

    def __init__(self, width: int, hidden: int, reader: DecoderConfig, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(width)
        self.up = Linear(width, hidden, rngs=rngs)
        self.down = Linear(hidden, width, rngs=rngs)
        self.read = Linear(width, 2 * reader.layers * reader.kv_heads * reader.head_dim, rngs=rngs)
        self.gain = nnx.Param(jnp.ones((reader.layers, 2)))
        self.tasks = nnx.Param(jax.random.normal(rngs.params(), (len(TASKS), reader.width)))
        self.task_gain = nnx.Param(jnp.ones(()))
        self.reader = reader

    def __call__(self, latents: Float[Array, "b m z"], task: str) -> KeysValues:
        """Returns the keys and values of as many positions as latents, and the task's vector."""
        y = self.read(latents + self.down(jax.nn.gelu(self.up(self.norm(latents)))))
        rows, slots, _ = y.shape
        y = y.reshape(rows, slots, self.reader.layers, 2, self.reader.kv_heads, self.reader.head_dim)
        y = y * self.gain[...].astype(y.dtype)[None, None, :, :, None, None]
        k, v = y.transpose(3, 2, 0, 1, 4, 5)
        vector = (self.tasks[...][TASKS.index(task)] * self.task_gain[...]).astype(y.dtype)
        return KeysValues(k, v, jnp.broadcast_to(vector[None, None, :], (rows, 1, self.reader.width)))


def calibrate(adapter: Pure[Adapter], params: Tree, *, key: jax.Array, slots: int, target: jax.Array) -> Tree:
    """Sets the gain so that unit-RMS latents come out with RMS `target` (the reader's embedding RMS)."""
    width = params["norm"]["scale"].shape[0]
    latents = jax.random.normal(key, (8, slots, width))
    size = rms(adapter.bind(params)(latents, TASKS[0])[:, :-1], axis=None)
    return params | {"gain": target.astype(jnp.float32) / size.reshape(())}


def rms(x: jax.Array, *, axis: int | tuple[int, ...] | None) -> jax.Array:
    """Root mean square in fp32, dimensions kept, in the input's dtype."""
    wide = x.astype(jnp.float32)
    return jnp.sqrt(jnp.mean(wide * wide, axis=axis, keepdims=True)).astype(x.dtype)
