"""What a run must agree with: to be resumed, the content of its data; to be read, its weights and configuration."""

import dataclasses
import json
from pathlib import Path

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


pytestmark = pytest.mark.usefixtures("cache")


def write_examples(file: Path, *, edit: bool) -> None:
    """Rows of one size, whatever is edited."""
    rows = [{"context": one.context, "question": one.question, "answers": one.answers} for one in ROWS]
    if edit:
        rows[5]["context"] = rows[5]["context"].replace(" ", "-", 1)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_pairs(file: Path, *, edit: bool) -> None:
    rows = [{"prompt": f"{one.context} ", "chosen": one.answers[0], "rejected": f"{one.answers[0]} no"} for one in ROWS]
    if edit:
        rows[5]["chosen"] = rows[5]["chosen"][::-1]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


class Kinds:
    """Runs of each recipe on files in a folder."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder

    def write(self, kind: str, name: str, *, edit: bool = False) -> None:
        if kind == "ttt":
            text = " ".join(one.context for one in ROWS) + ("!" if edit else ".")
            (self.folder / f"{name}.txt").write_text(text, "utf-8")
        else:
            (write_pairs if kind == "dpo" else write_examples)(self.folder / f"{name}.jsonl", edit=edit)

    def make(self, kind: str):
        ending = "txt" if kind == "ttt" else "jsonl"
        for name in ("train", "validation"):
            if not (self.folder / f"{name}.{ending}").exists():
                self.write(kind, name, edit=name == "validation")
        data = {f"data__{name}": str(self.folder / f"{name}.{ending}") for name in ("train", "validation")}
        if kind == "dpo":
            if not (self.folder / "model").exists():
                tiny.write_reader(self.folder / "model", "llama", head_dim=16, width=64, ffn=128)
            return test_dpo.make(self.folder, train__global_batch=4, **data)
        if kind == "ttt":
            return tiny.make_ttt(self.root, **data)
        if kind == "passages":
            file = self.folder / "passages.txt"
            if not file.exists():
                file.write_text("\n\n".join(one.context for one in ROWS), "utf-8")
            data |= {"stages__pretrain__share": 0.5, "stages__pretrain__lengths": (16,), "data__passages": str(file)}
        return tiny.make_recipe(self.root, data__validation_limit=0, **data)


@pytest.fixture
def kinds(root, tmp_path):
    return Kinds(root, tmp_path)


def open_folder(folder: Path, identity: dict[str, str]) -> Checkpointer:
    return Checkpointer(folder, keep=2, identity=identity)


def save(folder: Path, identity: dict[str, str], trainable=None, step: int = 3) -> None:
    with open_folder(folder, identity) as checkpointer:
        state = {"trainable": {"a": jnp.zeros(2)} if trainable is None else trainable}
        checkpointer.save(step, state, data={}, wait=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("latentwire", "train"),
        ("latentwire", "validation"),
        ("passages", "passages"),
        ("dpo", "train"),
        ("ttt", "train"),
    ],
)
def test_file_edited_in_place_is_refused_by_name_where_a_run_is_resumed(kinds, tmp_path, kind, name):
    first = kinds.make(kind)
    identity = recipes.identity(first, first.cfg)
    save(tmp_path / "saved", identity)
    open_folder(tmp_path / "saved", recipes.identity(kinds.make(kind), first.cfg)).close()
    if name == "passages":
        file = tmp_path / "passages.txt"
        file.write_text(file.read_text("utf-8").replace("a", "o", 3), "utf-8")
    else:
        kinds.write(kind, name, edit=name == "train")
    changed, key = recipes.identity(kinds.make(kind), first.cfg), "train" if name == "passages" else name
    assert [each for each in identity if identity[each] != changed.get(each)] == [key]
    with pytest.raises(UserError, match=rf"checkpoint 3 .*{key}="):
        open_folder(tmp_path / "saved", changed)


def test_same_rows_elsewhere_and_made_cards_have_the_same_content(kinds, root, tmp_path):
    first = kinds.make("latentwire")
    for name in ("train", "validation"):
        (tmp_path / f"moved_{name}.jsonl").write_bytes((tmp_path / f"{name}.jsonl").read_bytes())
    moved = tiny.make_recipe(
        root,
        data__validation_limit=0,
        **{f"data__{name}": str(tmp_path / f"moved_{name}.jsonl") for name in ("train", "validation")},
    )
    assert first.content() == moved.content()
    made, again, other = (tiny.make_recipe(root, seed=seed).content() for seed in (1, 1, 2))
    assert made == again != other


@pytest.mark.parametrize("kind", ["latentwire", "dpo", "ttt"])
def test_run_is_read_when_its_data_is_gone_and_refused_when_its_weights_are_others(kinds, tmp_path, kind, monkeypatch):
    recipe = kinds.make(kind)
    shapes = recipe.abstract().trainable
    trainable = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    save(tmp_path / "run" / "checkpoints", recipes.identity(recipe, recipe.cfg), trainable)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.{'txt' if kind == 'ttt' else 'jsonl'}").unlink()
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "another"))  # nor what was packed of it
    again = recipes.make(recipe.cfg, recipe.placement)
    assert recipes.read_best(again, recipe.cfg, tmp_path / "run").step == 3
    if kind == "ttt":
        tiny.call("export", recipe.cfg, tmp_path / "run", model=str(tmp_path / "m"))
    other = dataclasses.replace(recipe.cfg, seed=5)
    with pytest.raises(UserError, match="config="):
        recipes.read_best(again, other, tmp_path / "run")
