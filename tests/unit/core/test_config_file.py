from pathlib import Path

import pytest

from configs import base
from lw_jax.core import command_line, config_file
from lw_jax.core.errors import UserError

PROJECT = Path(__file__).resolve().parents[3]


def _write(folder: Path, text: str) -> str:
    file = folder / "mine.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_file_of_the_project_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file.find("configs/smoke.py", root=PROJECT) == PROJECT / "configs" / "smoke.py"


def test_file_of_the_current_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "smoke.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert config_file.find("configs/smoke.py", root=PROJECT) == tmp_path.resolve() / "configs" / "smoke.py"


def test_missing_file_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"--config configs/smok.py: no such file.*Did you mean 'configs/smoke.py'"):
        config_file.load("configs/smok.py", root=PROJECT)


def test_home_of_an_unknown_user_is_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match="--config ~nobody_here/x.py: no such file"):
        config_file.find("~nobody_here/x.py", root=PROJECT)


def test_list_may_begin_with_a_mark_of_utf_8(tmp_path: Path) -> None:
    (tmp_path / "two.list").write_text("\ufeffconfigs/smoke.py\nconfigs/pairs.py\n", encoding="utf-8")
    names = config_file.read_list(str(tmp_path / "two.list"), root=PROJECT)
    assert names == ["configs/smoke.py", "configs/pairs.py"]


def test_word_after_the_colon_reaches_get_config(tmp_path: Path) -> None:
    text = "from configs import base\n\ndef get_config(recipe='latentwire'):\n    return base.get_config(recipe)\n"
    path = _write(tmp_path, text)
    assert config_file.load(f"{path}:reader", root=PROJECT).recipe == "reader"
    assert config_file.load(path, root=PROJECT).recipe == "latentwire"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:", r"mine\.py:1: invalid syntax"),
        ("x = 1", "defines no get_config"),
        ("get_config = 5", "defines no get_config"),
        ("raise RuntimeError('no')", r"mine\.py:1: RuntimeError: no; the configuration must run"),
        ("def get_config(recipe):\n    return 1 / 0", r"mine\.py:2: ZeroDivisionError: division by zero"),
        ("def get_config(recipe):\n    return get_config(recipe)", r"mine\.py:2: RecursionError"),
        ("import sys\nsys.exit(0)", r"mine\.py:2: SystemExit: 0"),
        ("import nothing_of_this_name", r"mine\.py:1: ModuleNotFoundError"),
        ("def get_config(recipe):\n    raise ValueError('a\\nb')", r"mine\.py:2: ValueError: a b; "),
        ("def get_config(recipe):\n    return {}", "returned dict, a ConfigDict is needed"),
        ("def get_config():\n    return {}", "takes no recipe"),
    ],
)
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_file.load(f"{_write(tmp_path, text)}:reader", root=PROJECT)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("train.steps", text) for text in ("1" * 5000, "(" * 200, "nan", "x" * 20_000)),
        *(("stages.answer.slots", text) for text in ("1" * 5000, "x" * 20_000)),
    ],
)
def test_word_that_is_no_such_value_is_refused_in_one_short_line(key: str, text: str) -> None:
    with pytest.raises(UserError, match=rf"^--config.{key}=") as refused:
        config_file.override(base.get_config(), {key: text})
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 2000


def test_file_that_is_no_python_is_refused() -> None:
    with pytest.raises(UserError, match=r"--config configs/smoke: a Python file is needed"):
        config_file.load("configs/smoke", root=PROJECT)


def test_assignments_are_taken_from_anywhere_in_both_forms() -> None:
    argv = ["eval", "--config.a.b=1=2", "--config", "x.py", "--config.c", "-3", "--workdir", "w"]
    assignments, rest = command_line.take_assignments(argv)
    assert assignments == {"a.b": "1=2", "c": "-3"}
    assert rest == ["eval", "--config", "x.py", "--workdir", "w"]


@pytest.mark.parametrize("argv", [["--config.seed"], ["--config.seed", "--workdir", "w"]])
def test_assignment_without_a_value_is_refused(argv: list[str]) -> None:
    with pytest.raises(UserError, match=r"--config\.seed: a value is needed"):
        command_line.take_assignments(argv)


def test_override_parses_as_the_type_it_replaces() -> None:
    values = base.get_config()
    values.llms.llama = base.llm("x")
    text = {
        "train.steps": "7",
        "optim.learning_rate": "3e-4",
        "mesh.data": "-1",
        "eval.rows": "text,none",
        "prompt.user": "a=b {context} {question}",
        "llms.llama.source": "7",
    }
    config_file.override(values, text)
    assert values.train.steps == 7
    assert values.optim.learning_rate == 3e-4
    assert values.mesh.data == -1
    assert values.eval.rows == ("text", "none")
    assert values.prompt.user == "a=b {context} {question}"
    assert values.llms.llama.source == "7"


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("dpo.weights", "1.0,0.5", (1.0, 0.5)),
        ("dpo.weights", "2,-1e-3", (2.0, -1e-3)),
        ("dpo.weights", "(1.0, 0.5)", (1.0, 0.5)),
        ("stages.answer.slots", "-4,8", (-4, 8)),
        ("stages.answer.slots", "4", (4,)),
        ("eval.rows", "7,none", ("7", "none")),
        ("train.log_to", "", ()),
    ],
)
def test_words_of_a_tuple_are_what_its_elements_are_declared_as(path: str, text: str, value: tuple) -> None:
    values = base.get_config()
    config_file.override(values, {path: text})
    found = config_file.flatten(values)[path]
    assert found == value and [type(one) for one in found] == [type(one) for one in value]


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("train.step", "7", r"--config\.train\.step .*'train\.steps'"),
        ("trian.steps", "7", "'train.steps'"),
        ("train", "7", "--config.train .*'train.alarm'"),
        ("train.steps", "7.5", r"--config\.train\.steps=7\.5: .*int"),
        ("optim.learning_rate", "fast", "optim.learning_rate=fast: .*float"),
        ("dpo.weights", "1.0,high", r"--config\.dpo\.weights=1\.0,high: .*tuple of float"),
        ("stages.answer.slots", "1.5", r"--config\.stages\.answer\.slots=1\.5: .*tuple of int"),
    ],
)
def test_impossible_override_is_refused_in_one_line(path: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config_file.override(base.get_config(), {path: text})
    assert "\n" not in str(caught.value)


def test_origin_of_every_value_is_known() -> None:
    values = base.get_config()
    values.train.steps = 7
    values.llms.llama = base.llm("x")
    origins = config_file.trace(base.get_config(), values, {"seed": "0"})
    assert origins["train.steps"] == origins["llms.llama.source"] == "config"
    assert origins["train.log_every"] == "base"
    assert origins["seed"] == "command line"
    assert set(origins) == set(config_file.flatten(values))


def test_values_set_aside_are_the_bases_again_and_told() -> None:
    defaults, values = base.get_config(), base.get_config()
    values.mesh.placement, values.train.steps = "split", 7
    assert config_file.set_aside(values, defaults, ("mesh.placement", "mesh.model")) == {"mesh.placement": "split"}
    assert (values.mesh.placement, values.train.steps) == (defaults.mesh.placement, 7)
