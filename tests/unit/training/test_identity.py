"""What a run must agree with: to be resumed, the content of its data; to be read, its weights and configuration."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lw_jax import recipes
from lw_jax.core.errors import UserError
from lw_jax.data import question_cards
from lw_jax.training.checkpoint import Checkpointer
from tests import tiny
from tests.unit.recipes import test_dpo

ROWS = question_cards.make(24, facts=2, seed=7, split="train")
FILES = ("train.jsonl", "validation.jsonl", "passages.jsonl")


pytestmark = pytest.mark.usefixtures("cache")


def write(file: Path, *, edit: bool) -> None:
    """Writes rows that every recipe reads, of one size whatever is edited."""
    lines = []
    for number, one in enumerate(ROWS):
        answer, text = one.answers[0], one.context
        if edit and number == 5:
            text = text.replace(" ", "-", 1)
        row = {"context": text, "question": one.question, "answers": one.answers, "text": text}
        row |= {"prompt": f"{text} ", "chosen": answer, "rejected": f"{answer} no"}
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines), "utf-8")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Folder of the model of the recipe dpo."""
    folder = tmp_path_factory.mktemp("policy")
    tiny.write_reader(folder / "model", "llama", head_dim=16, width=64, ffn=128)
    return folder


@pytest.fixture
def make(root, policy, tmp_path) -> Callable[[str], Any]:
    """Makes a run of each kind on the files of the test's own folder."""
    for name in FILES:
        write(tmp_path / name, edit=name == "validation.jsonl")

    def call(kind: str) -> Any:
        data: dict[str, Any] = {f"data__{name}": str(tmp_path / f"{name}.jsonl") for name in ("train", "validation")}
        if kind == "dpo":
            return test_dpo.make(policy, train__global_batch=4, **data)
        if kind == "ttt":
            return tiny.make_ttt(root, **data)
        if kind == "cache":
            data |= {"encoder__kind": "cache", "encoder__width": 60, "stages__pretrain__reconstruct": 1.0}
        if kind in ("passages", "cache"):
            data |= {"stages__pretrain__share": 0.5, "stages__pretrain__lengths": (16,)}
            data["data__passages"] = str(tmp_path / "passages.jsonl")
        return tiny.make_recipe(root, data__validation_limit=0, **data)

    return call


def open_folder(folder: Path, identity: dict[str, str]) -> Checkpointer:
    return Checkpointer(folder, keep=2, identity=identity)


def save(folder: Path, identity: dict[str, str], trainable: Any) -> None:
    with open_folder(folder, identity) as checkpointer:
        checkpointer.save(3, {"trainable": trainable}, data={}, wait=True)


@pytest.mark.parametrize(
    ("kind", "file", "key"),
    [
        ("latentwire", "train", "train"),
        ("latentwire", "validation", "validation"),
        ("passages", "passages", "train"),
        ("cache", "passages", "train"),
        ("dpo", "train", "train"),
        ("ttt", "train", "train"),
    ],
)
def test_file_edited_in_place_is_refused_by_name_where_a_run_is_resumed(make, tmp_path, kind, file, key):
    first = make(kind)
    identity = recipes.identity(first, first.cfg)
    save(tmp_path / "saved", identity, {"a": jnp.zeros(2)})
    open_folder(tmp_path / "saved", recipes.identity(make(kind), first.cfg)).close()
    write(tmp_path / f"{file}.jsonl", edit=file != "validation")
    changed = recipes.identity(make(kind), first.cfg)
    assert [each for each in identity if identity[each] != changed.get(each)] == [key]
    with pytest.raises(UserError, match=rf"checkpoint 3 .*{key}=.*data") as refusal:
        open_folder(tmp_path / "saved", changed)
    assert "configuration" not in str(refusal.value), "it is the same"


def test_same_rows_elsewhere_and_made_cards_have_the_same_content(make, root, tmp_path):
    first = make("latentwire").content()
    for name in FILES:
        (tmp_path / name).rename(tmp_path / f"moved_{name}")
    moved = {f"data__{name}": str(tmp_path / f"moved_{name}.jsonl") for name in ("train", "validation")}
    assert tiny.make_recipe(root, data__validation_limit=0, **moved).content() == first
    made, again, other = (tiny.make_recipe(root, seed=seed).content() for seed in (1, 1, 2))
    assert made == again != other


@pytest.mark.parametrize("kind", ["latentwire", "dpo", "ttt"])
def test_run_is_read_when_its_data_is_gone_and_refused_when_its_weights_are_others(make, tmp_path, kind, monkeypatch):
    recipe = make(kind)
    trainable = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), recipe.abstract.trainable)
    save(tmp_path / "run" / "checkpoints", recipes.identity(recipe, recipe.cfg), trainable)
    for name in FILES:
        (tmp_path / name).unlink()
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "another"))  # nor what was packed of it
    again = recipes.make(recipe.cfg, recipe.placement)
    assert recipes.read_best(again, recipe.cfg, tmp_path / "run").step == 3
    if kind == "ttt":
        tiny.call("export", recipe.cfg, tmp_path / "run", model=str(tmp_path / "m"))
    other = dataclasses.replace(recipe.cfg, seed=5)
    with pytest.raises(UserError, match="config="):
        recipes.read_best(again, other, tmp_path / "run")
