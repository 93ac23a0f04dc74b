"""An encoder of LoRA pairs beside a frozen body: where it begins, what is trained and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core import tree
from lw_jax.core.types import SHARED
from lw_jax.planning import estimate
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training.step_spec import StepSpec
from tests import tiny

RANK = 3


def make(root, rank: int = RANK, **changes: object) -> LatentWire:
    source = str(tiny.readers(root)["qwen"])
    body = {"encoder__kind": "lm", "encoder__source": source, "encoder__layers": 2}
    return tiny.make_recipe(root, only="llama", **body | {"encoder__rank": rank} | changes)


def texts(recipe: LatentWire):
    return jax.tree.map(jnp.asarray, recipe.data("validation").collate(range(3))["source"])


@pytest.mark.parametrize("changes", [{}, {"adapter__start": "aligned", "compute__dtype": "bf16"}], ids=["fp32", "bf16"])
def test_fresh_pairs_give_the_latents_and_the_adapters_of_the_untouched_body(root, changes):
    plain, paired = make(root, 0, **changes), make(root, **changes)
    before, built = plain.build(), paired.build()
    assert set(built.trainable["encoder"]) == {"lora", "head"} and SHARED not in before.frozen
    jax.tree.map(np.testing.assert_array_equal, built.trainable["adapters"], before.trainable["adapters"])
    encode, source = jax.jit(paired.wire.encode), texts(plain)
    found = encode(built.trainable, source, built.frozen[SHARED])
    np.testing.assert_array_equal(found, jax.jit(plain.wire.encode)(before.trainable, source))
    for name in built.trainable["encoder"]["lora"]["layers"]:  # each pair is heard
        pairs = jax.tree.map(lambda leaf: leaf, built.trainable["encoder"]["lora"])
        pairs["layers"][name]["b"] += 0.1
        moved = built.trainable | {"encoder": built.trainable["encoder"] | {"lora": pairs}}
        assert np.abs(np.asarray(encode(moved, source, built.frozen[SHARED]) - found)).max() > 1e-3, name


def test_frozen_body_has_the_shapes_that_are_planned_and_no_share_of_what_is_saved(root):
    recipe = make(root, compute__dtype="bf16", devices=2)
    shapes, built, program = recipe.abstract, recipe.build(), StepSpec(recipe.cfg, recipe)
    placed = jax.tree.map(lambda leaf, at: (leaf.shape, leaf.dtype, at), shapes.frozen, recipe.shardings.frozen)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), built.frozen) == placed
    (weights,) = program.frozen_bytes().values()
    assert weights == sum(map(tree.nbytes, built.frozen.values())) > tree.nbytes(built.frozen["llama"])
    needs = estimate.estimate(program, recipe.batch_widths(), 0, None).needs
    assert needs.weights == weights and needs.trainable == tree.nbytes(shapes.trainable)
    width, slots = shapes.frozen[SHARED]["embed"].shape[1], recipe.cfg.encoder.width
    head = shapes.trainable["encoder"]["head"]
    assert tree.count(head) == width * slots + slots + 3
    assert tree.count(shapes.trainable["encoder"]) - tree.count(head) < tree.count(shapes.frozen[SHARED]["layers"])
