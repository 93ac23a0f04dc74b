"""Every configuration file resolves, is valid and is what it was; UPDATE_GOLDEN=1 writes the files anew."""

import os
from pathlib import Path

import pytest

from lw_jax.core import config, config_file, validation

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = Path(__file__).resolve().parent / "configs"
NOT_CONFIGURATIONS = {"__init__", "base", "models"}
NAMES = sorted({file.stem for file in (ROOT / "configs").glob("*.py")} - NOT_CONFIGURATIONS)


def _build(name: str) -> config.Config:
    cfg = config.build(config_file.load(f"configs/{name}.py", root=ROOT))
    validation.validate(cfg)
    return cfg


@pytest.mark.parametrize("name", NAMES)
def test_resolved_configuration_is_unchanged(name: str) -> None:
    values = config.flatten(config.to_dict(_build(name)))
    text = "".join(f"{path} = {value!r}\n" for path, value in values.items())
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "changed on purpose? make golden, and say why in the commit"


def test_no_golden_file_is_left_over() -> None:
    assert sorted(file.stem for file in GOLDEN.glob("*.txt")) == NAMES


def test_every_h100_file_means_the_same_run() -> None:
    meanings = {config.digest(config.meaning(_build(name))) for name in NAMES if name.startswith("h100")}
    assert len(meanings) == 1
