from pathlib import Path
from typing import Any

import pytest

from configs import base
from lw_jax.core import command_line, config_file
from lw_jax.core.errors import UserError
from tests.commands import PROJECT


def _write(folder: Path, text: str) -> str:
    file = folder / "mine.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_file_of_the_current_folder_comes_before_that_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file.find("configs/smoke.py", root=PROJECT) == PROJECT / "configs" / "smoke.py"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "smoke.py").touch()
    assert config_file.find("configs/smoke.py", root=PROJECT) == tmp_path.resolve() / "configs" / "smoke.py"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("configs/smok.py", "configs/smoke.py"), ("~nobody_here/x.py", ""), ("configs/smoke", "")],
)
def test_missing_file_is_refused_with_the_nearest_one(name: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"--config {name}: .*{remedy}"):
        config_file.load(name, root=PROJECT)


def test_word_after_the_colon_reaches_get_config(tmp_path: Path) -> None:
    text = "from configs import base\n\ndef get_config(recipe='latentwire'):\n    return base.get_config(recipe)\n"
    path = _write(tmp_path, text)
    assert config_file.load(f"{path}:reader", root=PROJECT).recipe == "reader"
    assert config_file.load(path, root=PROJECT).recipe == "latentwire"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def get_config(:", r"mine\.py:1: "),
        ("get_config = 5", "get_config"),
        ("raise RuntimeError('no')", r"mine\.py:1: RuntimeError: no"),
        ("def get_config(recipe):\n    return get_config(recipe)", r"mine\.py:2: RecursionError"),
        ("import sys\nsys.exit(0)", r"mine\.py:2: SystemExit: 0"),
        ("def get_config(recipe):\n    raise ValueError('a\\nb')", r"mine\.py:2: ValueError: a b; "),
        ("def get_config(recipe):\n    return {}", "dict"),
        ("def get_config():\n    return {}", "takes no recipe"),
    ],
)
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        config_file.load(f"{_write(tmp_path, text)}:reader", root=PROJECT)


def test_assignments_are_taken_from_anywhere_in_both_forms() -> None:
    argv = ["eval", "--config.a.b=1=2", "--config", "x.py", "--config.c", "-3", "--workdir", "w"]
    assignments, rest = command_line.take_assignments(argv)
    assert assignments == {"a.b": "1=2", "c": "-3"}
    assert rest == ["eval", "--config", "x.py", "--workdir", "w"]
    with pytest.raises(UserError, match=r"--config\.seed"):
        command_line.take_assignments(["--config.seed", "--workdir", "w"])


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.steps", "7", 7),
        ("optim.learning_rate", "3e-4", 3e-4),
        ("mesh.data", "-1", -1),
        ("prompt.user", "a=b {context} {question}", "a=b {context} {question}"),
        ("llms.llama.source", "7", "7"),
        ("dpo.weights", "2,-1e-3", (2.0, -1e-3)),
        ("dpo.weights", "(1.0, 0.5)", (1.0, 0.5)),
        ("stages.answer.slots", "4", (4,)),
        ("eval.rows", "7,none", ("7", "none")),
        ("train.log_to", "", ()),
    ],
)
def test_override_parses_as_the_type_that_is_declared(path: str, text: str, value: Any) -> None:
    values = base.get_config()
    values.llms.llama = base.llm("x")
    config_file.override(values, {path: text})
    found = config_file.flatten(values)[path]
    assert (found, type(found)) == (value, type(value))
    if isinstance(value, tuple):
        assert [type(one) for one in found] == [type(one) for one in value]


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("train.step", "7", "train.steps"),
        ("train", "7", "train.alarm"),
        ("train.steps", "7.5", "int"),
        ("train.steps", "1" * 5000, ""),
        ("train.steps", "(" * 200, ""),
        ("optim.learning_rate", "fast", "float"),
        ("dpo.weights", "1.0,high", "float"),
        ("stages.answer.slots", "1.5", "int"),
        ("stages.answer.slots", "x" * 20_000, ""),
    ],
)
def test_impossible_override_is_refused_in_one_short_line(path: str, text: str, named: str) -> None:
    with pytest.raises(UserError, match=rf"^--config\.{path}.*{named}") as caught:
        config_file.override(base.get_config(), {path: text})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


def test_values_set_aside_are_the_bases_again_and_told() -> None:
    defaults, values = base.get_config(), base.get_config()
    values.mesh.placement, values.train.steps = "split", 7
    assert config_file.set_aside(values, defaults, ("mesh.placement", "mesh.model")) == {"mesh.placement": "split"}
    assert (values.mesh.placement, values.train.steps) == (defaults.mesh.placement, 7)
