"""lw_jax/recipes/join.py: which runs' encoders can be taken, and what is said of the others."""

import pytest

from lw_jax.core.errors import UserError
from lw_jax.recipes import join
from lw_jax.training import run_folder
from tests import tiny


@pytest.fixture(scope="module")
def folder(root, tmp_path_factory):
    """The folder of a run that has not saved anything yet."""
    at = tmp_path_factory.mktemp("run")
    run_folder.write_workdir(at, cfg=tiny.make_config(root), base={}, command=["test"])
    return str(at)


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
