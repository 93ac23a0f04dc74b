"""Muon's step equals torch.optim.Muon's, which iterates in bf16."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lw_jax.core import config
from lw_jax.training import optimizers
from lw_jax.training.optimizers import Phase

BF16 = 0.04  # of the step's largest value: eight bits, multiplied fifteen times


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_first_step_is_torch_s(shape):
    rng = np.random.default_rng(0)
    weight, gradient = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    theirs = torch.nn.Parameter(torch.tensor(weight))
    theirs.grad = torch.tensor(gradient)
    torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    cfg = config.Optim("muon", 1e-2, 0, 1.0, 0.0, 1e9, 0.99)
    tree = {"project": {"kernel": jnp.asarray(weight)}}
    made = optimizers.make(cfg, phases=[Phase(10)], rates=((".*", 1.0),), abstract=tree)
    ours, _ = made.update({"project": {"kernel": jnp.asarray(gradient)}}, made.init(tree), tree)
    step = theirs.detach().numpy() - weight
    np.testing.assert_allclose(ours["project"]["kernel"], step, atol=BF16 * np.abs(step).max())
