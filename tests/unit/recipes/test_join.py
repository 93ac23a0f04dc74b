"""lw_jax/recipes/join.py: which runs' encoders can be taken, and what is said of the others."""

import pytest

from lw_jax.core.errors import UserError
from lw_jax.recipes import join
from lw_jax.training import checkpoint
from tests import tiny


@pytest.fixture(scope="module")
def folder(root, tmp_path_factory):
    """The folder of a run that has not saved anything yet."""
    return str(tiny.start_folder(tmp_path_factory.mktemp("run"), tiny.make_config(root)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("slots", 4), ("width", 32), ("window", 128), ("windows", 2), ("pooling", "queries"), ("layers", 2)],
)
def test_encoder_of_other_settings_is_refused_by_key_with_both_values(root, folder, key, value):
    cfg = tiny.make_config(root, encoder__run=folder, **{f"encoder__{key}": value})
    theirs = getattr(tiny.make_config(root).encoder, key)
    message = rf"config\.encoder\.{key} = {value!r}.*{theirs!r}"
    with pytest.raises(UserError, match=message):
        join.read_config(cfg)


def test_settings_that_say_nothing_of_the_encoder_may_differ(root, folder):
    cfg = tiny.make_config(root, encoder__run=folder, encoder__rate=0.7, encoder__ratio=9, seed=3, data__facts=1)
    assert join.read_config(cfg).encoder.slots == cfg.encoder.slots


def test_folder_that_is_no_run_is_refused(root, tmp_path):
    cfg = tiny.make_config(root, encoder__run=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"nowhere/config\.json"):
        join.read_config(cfg)


def test_run_without_a_checkpoint_is_refused(root, folder):
    cfg = tiny.make_config(root, encoder__run=folder)
    with pytest.raises(UserError, match=rf"encoder\.run = '{folder}': {folder}"):
        join.read_trainable(cfg, {})


def test_encoder_on_another_body_or_tokenizer_is_refused(root, tmp_path, folder, monkeypatch):
    lm = {"encoder__kind": "lm", "encoder__source": str(tiny.readers(root)["llama"])}
    saved = tiny.make_recipe(root, **lm).identity()

    def read(identity, **changes):
        restored = checkpoint.Restored(1, {"trainable": "theirs"}, data={}, identity=identity)
        monkeypatch.setattr(checkpoint, "read_best", lambda *_, **__: restored)
        return join.read_trainable(tiny.make_config(root, encoder__run=folder, **lm | changes), {})

    assert read(saved) == "theirs"
    with pytest.raises(UserError, match=r"encoder\.run = .*: its encoder has a tokenizer of fingerprint other"):
        read(saved | {"tokenizers/encoder": "other"})
    other = {"encoder__source": str(tiny.write_reader(tmp_path / "other", "llama", seed=1))}
    with pytest.raises(UserError, match="its encoder has a pretrained body of fingerprint"):
        read(saved, **other)
    joined = tiny.make_recipe(root, encoder__run=folder, **lm)
    assert read(joined.identity(), **other) == "theirs", "trained: its arrays are the run's"
    paired = tiny.make_recipe(root, encoder__run=folder, encoder__rank=2, **lm)
    with pytest.raises(UserError, match="its encoder has a pretrained body of fingerprint"):
        read(paired.identity(), encoder__rank=2, **other)
