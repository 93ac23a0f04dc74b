"""Every configuration file resolves, is valid and is what it was; UPDATE_GOLDEN=1 writes the files anew."""

import os
from pathlib import Path

import pytest

from lw_jax.core import config, config_file, validation

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = Path(__file__).resolve().parent / "configs"
NOT_CONFIGURATIONS = {"__init__", "base", "models", "common"}


def _names(folder: Path, suffix: str) -> list[str]:
    files = (file for file in folder.rglob(f"*{suffix}") if file.stem not in NOT_CONFIGURATIONS)
    return sorted(file.relative_to(folder).as_posix().removesuffix(suffix) for file in files)


NAMES = _names(ROOT / "configs", ".py")


def _build(name: str) -> config.Config:
    file, _, variant = name.partition(":")
    cfg = config.build(config_file.load(f"configs/{file}.py{variant and f':{variant}'}", root=ROOT))
    validation.validate(cfg)
    return cfg


@pytest.mark.parametrize("name", NAMES)
def test_resolved_configuration_is_unchanged(name: str) -> None:
    values = config.flatten(config.to_dict(_build(name)))
    text = "".join(f"{path} = {value!r}\n" for path, value in values.items())
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "changed on purpose? make golden, and say why in the commit"


def test_no_golden_file_is_left_over() -> None:
    assert _names(GOLDEN, ".txt") == NAMES


def _is_machine(name: str) -> bool:
    return name.startswith("machines/") or name == "h100x4"


def test_every_machine_file_with_both_readers_means_the_same_run() -> None:
    machines = [name for name in NAMES if name == "large" or (_is_machine(name) and name != "machines/a100_40x1")]
    assert len(machines) > 10
    assert len({config.digest(config.meaning(_build(name))) for name in machines}) == 1


def test_machine_file_decides_nothing_but_what_the_planner_searches() -> None:
    large = config.flatten(config.to_dict(_build("large")))
    for name in NAMES:
        if _is_machine(name):
            values = config.flatten(config.to_dict(_build(name)))
            changed = {path for path in large if path in values and values[path] != large[path]}
            assert changed <= set(config.SEARCHED), name
