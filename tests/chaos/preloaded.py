"""What a training process imports, imported once; nothing here may start a device or a thread."""

import lw_jax.commands.evaluate
import lw_jax.commands.train
import lw_jax.recipes.latentwire
import lw_jax.recipes.ttt
import lw_jax.training.checkpoint
import run

__all__ = ["lw_jax", "run"]
