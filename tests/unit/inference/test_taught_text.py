"""lw_jax/inference/taught_text.py: the same vector under every placement, with packed readers too."""

import errno
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import batches
from lw_jax.hub import sources
from lw_jax.inference import taught_text
from lw_jax.losses import token_losses
from lw_jax.models import wire
from tests import tiny

SAME = 2e-3  # of values near 1, after a few steps of Adam


pytestmark = pytest.mark.usefixtures("cache")


def teach(root, **places):
    recipe = tiny.make_recipe(root, eval__taught_steps=4, only="llama", compute__dtype="fp32", **places)
    found = taught_text.teach(recipe, recipe.load_frozen(), batch=8)
    return np.asarray(found["llama"])


def test_vector_is_the_same_on_any_devices(root, monkeypatch, tmp_path):
    found = []
    for number, places in enumerate(({}, {"devices": 4, "model": 2, "mesh__model": 2})):
        monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / str(number)))
        found.append(teach(root, **places))
    np.testing.assert_allclose(found[1] / found[0].std(), found[0] / found[0].std(), atol=SAME)


def test_a_damaged_vector_in_the_cache_is_trained_anew(root, tmp_path):
    found = teach(root)
    (file,) = (sources.cache_root() / "taught").glob("*.npy")
    whole = file.read_bytes()
    np.save(tmp_path / "nan.npy", np.full_like(found, np.nan))
    for damaged in (whole[:-5], (tmp_path / "nan.npy").read_bytes()):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(teach(root), found)
        assert file.read_bytes() == whole


def test_a_vector_that_diverged_is_refused_and_not_kept(root, monkeypatch):
    recipe = tiny.make_recipe(root, eval__taught_steps=4, only="llama")
    monkeypatch.setattr(taught_text, "_train", lambda *given, **options: (np.full((1, 48), np.nan, "f"), [np.nan] * 4))
    with pytest.raises(UserError, match=r"text_taught llama: .*taught_steps"):
        taught_text.teach(recipe, {"llama": {}}, batch=8)
    assert not list((sources.cache_root() / "taught").glob("*"))


def test_a_vector_that_cannot_be_kept_is_refused_before_it_is_trained(root, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    recipe = tiny.make_recipe(root, eval__taught_steps=4, only="llama")
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(taught_text, "_train", lambda *given, **options: pytest.fail("trained, and lost"))
    with pytest.raises(UserError, match="LW_JAX_CACHE"):
        taught_text.teach(recipe, {"llama": {}}, batch=8)


def sums(recipe, fields, *, whole=False):
    """Returns the sums of loss and weights, and the vector's gradient, of one batch of a reader's fields."""
    params, size = recipe.load_frozen()["qwen"], jnp.float32(0.3)
    fields = jax.tree.map(jnp.asarray, fields)
    trainable = {"tasks": jax.random.normal(jax.random.key(0), (1, recipe.wire.readers["qwen"].config.width))}
    if not whole:
        measure, *_ = taught_text._programs(recipe.wire, "qwen", 4)
        return measure(params, trainable, size, fields)

    def loss(trainable):
        prompt = wire.taught_prompt(params, fields, trainable["tasks"] * size)
        logits = recipe.wire.answer_logits(params, "qwen", prompt, fields)
        return token_losses.nll(logits, fields["targets"], fields["weights"])

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)


def check_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert np.abs(wanted[1]["tasks"]).max() > 1e-2
    np.testing.assert_allclose(
        found[1]["tasks"], wanted[1]["tasks"], atol=1e-4 * float(np.abs(wanted[1]["tasks"]).max())
    )


def test_a_text_read_once_for_all_of_its_questions_teaches_as_they_do_one_by_one(root):
    recipe = tiny.make_recipe(root, only="qwen", compute__dtype="fp32", data__packed_tokens=200, eval__taught_steps=2)
    training = taught_text._TrainingSet.of(taught_text._encode(recipe), recipe)
    groups, asked = training.stream.groups, training.stream.encoded
    assert training.step_size == 2 and len(groups) == 4 and {len(group) for group in groups} == {2}, "two facts a card"
    packed = training.stream.collate([0, 1])["readers"]["qwen"]
    alone = tiny.make_recipe(root, only="qwen", compute__dtype="fp32")
    examples = [asked.examples[position] for group in groups[:2] for position in group]
    encoded = batches.encode(examples, layout=alone.layout, rows=taught_text.FIELDS)
    fields = encoded.collate(range(4), rows=taught_text.FIELDS)["readers"]["qwen"]
    check_same(sums(recipe, packed), sums(alone, fields, whole=True))
