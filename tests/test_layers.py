"""Imports point down only (docs/architecture.md), and every configuration key is read by the product."""

import ast
import dataclasses
import functools
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from lw_jax.core.config import LLM, Config, Stages

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. A package imports itself and what stands below it; packages of one line do not know each other.
FLOORS = (
    ("sharding",),
    ("lw_jax.core",),
    ("lw_jax.models",),
    ("lw_jax.hub",),
    ("lw_jax.data", "lw_jax.losses"),
    ("lw_jax.training", "lw_jax.evals"),
    ("lw_jax.recipes",),
    ("lw_jax.planning",),
    ("lw_jax.inference", "lw_jax.benchmarking", "lw_jax.slurm", "lw_jax.report"),
    ("lw_jax",),
    ("lw_jax.commands",),
    ("run",),
)
# Configuration files, the users' code: loaded by path, imported by nobody; they import the declaration of the keys.
ISLAND = "configs"
ISLAND_MAY_IMPORT = ("dataclasses", "ml_collections", "configs", "lw_jax.core.config")
OURS = ("run", "lw_jax", "sharding", "configs")


def _place(module: str) -> tuple[int, int]:
    package = ".".join(module.split(".")[: 2 if module.startswith("lw_jax.") else 1])
    for level, packages in enumerate(FLOORS):
        if package in packages:
            return level, packages.index(package)
    raise AssertionError(f"{module} is in no known package: name it in docs/architecture.md and here")


@functools.cache
def _read_modules() -> dict[str, ast.Module]:
    files = [*ROOT.glob("run.py"), *(file for name in OURS[1:] for file in (ROOT / name).rglob("*.py"))]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    return {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in names.items()}


def _find_imports(tree: ast.Module, modules: typing.Container[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:  # `from package import module` names the module, not the package
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def find_violations(name: str, tree: ast.Module) -> list[str]:
    found = []
    for target in _find_imports(tree, _read_modules()):
        package = target.split(".")[0]
        if name.split(".")[0] == ISLAND:
            wrong = package not in ISLAND_MAY_IMPORT and target not in ISLAND_MAY_IMPORT
        elif package not in OURS:
            wrong = False
        elif package == ISLAND:
            wrong = True
        else:
            (level, column), (target_level, target_column) = _place(name), _place(target)
            wrong = target_level > level or (target_level == level and target_column != column)
        if wrong:
            found.append(f"{name} imports {target}")
    return found


def test_imports_point_down_only() -> None:
    assert [line for name, tree in _read_modules().items() for line in find_violations(name, tree)] == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("sharding.place", "from lw_jax.core import tree"),
        ("lw_jax.models.decoder", "import lw_jax.data.tokens"),
        ("lw_jax.data.tokens", "def f():\n    from lw_jax import recipes"),
        ("lw_jax.losses.token_losses", "from lw_jax.recipes import base"),
        ("lw_jax.training.trainer", "from configs import base"),
        ("configs.smoke", "import jax"),
        ("configs.smoke", "from lw_jax.core import runtime"),
    ],
)
def test_planted_import_is_found(module: str, code: str) -> None:
    assert find_violations(module, ast.parse(code))


def test_configuration_files_do_not_wait_for_jax() -> None:
    code = "import sys; from configs import base; base.get_config(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- every key of the configuration is read ---

SECTIONS = {field.name: typing.get_type_hints(Config)[field.name] for field in dataclasses.fields(Config)}
DOOR = (
    "lw_jax.core.config",
    "lw_jax.core.config_file",
    "lw_jax.core.validation",
    "lw_jax.commands.show",
    "lw_jax.commands.loading",
    "lw_jax.training.run_folder",
)


def _list_keys() -> set[tuple[str, str]]:
    """Returns (dataclass name, key) for every key."""
    keys = {("LLM", field.name) for field in dataclasses.fields(LLM)}
    stages = typing.get_type_hints(Stages).values()
    keys |= {("Stage", field.name) for kind in stages for field in dataclasses.fields(kind)}
    keys -= {("Stage", "share"), ("Stage", "reconstruct")}  # read by `config.stages` and `PretrainStage.tasks`
    for name, kind in SECTIONS.items():
        if kind is Stages:
            continue
        if dataclasses.is_dataclass(kind):
            keys |= {(typing.cast(type, kind).__name__, field.name) for field in dataclasses.fields(kind)}
        else:
            keys.add((Config.__name__, name))
    return keys


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript) and _name_of(node.value) == "llms":
        return "llm"
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _type_variables(tree: ast.Module) -> dict[str, set[str]]:
    """Returns which dataclasses of the configuration a variable's name may stand for in this module."""
    kinds = {typing.cast(type, kind).__name__ for kind in SECTIONS.values() if dataclasses.is_dataclass(kind)}
    found: dict[str, set[str]] = {"cfg": {"Config"}, "llm": {"LLM"}, "stage": {"Stage"}}
    for section, kind in SECTIONS.items():
        if dataclasses.is_dataclass(kind):
            found.setdefault(section, set()).add(typing.cast(type, kind).__name__)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            variable = node.arg if isinstance(node, ast.arg) else _name_of(node.target)
            for part in ast.walk(node.annotation):
                if isinstance(part, ast.Name | ast.Attribute) and _name_of(part) in kinds | {"Config", "LLM", "Stage"}:
                    found.setdefault(variable, set()).add(_name_of(part))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and _name_of(node.value) in SECTIONS:
            kind = SECTIONS[_name_of(node.value)]
            if dataclasses.is_dataclass(kind):
                found.setdefault(_name_of(node.targets[0]), set()).add(typing.cast(type, kind).__name__)
    return found


def find_dead_keys(modules: dict[str, ast.Module]) -> list[str]:
    dead = _list_keys()
    for name, tree in modules.items():
        if name in DOOR or not name.startswith(("lw_jax", "sharding")):
            continue
        variables = _type_variables(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                dead -= {(kind, node.attr) for kind in variables.get(_name_of(node.value), ())}
    return sorted(f"{kind}.{key}" for kind, key in dead)


def test_every_configuration_key_is_read() -> None:
    assert find_dead_keys(_read_modules()) == []


def test_key_that_nobody_reads_is_found() -> None:
    code = "def f(sizes: config.Encoder, cfg: Config):\n    start = cfg.adapter.start\n    return sizes.slots"
    dead = find_dead_keys({"lw_jax.models.encoder": ast.parse(code)})
    assert {"Encoder.slots", "Adapter.start"}.isdisjoint(dead)
    assert {"Encoder.rate", "Adapter.hidden", "Eval.rows", "LLM.source"} <= set(dead)
