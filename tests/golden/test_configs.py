"""Every configuration file resolves, is valid and is what it was; UPDATE_GOLDEN=1 writes `configs.txt` anew.

One file has the defaults and, of every configuration, what differs from its recipe's: a changed default or parent file
shows in all that inherit it.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from lw_jax.core import config, config_file, validation
from lw_jax.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).resolve().parent / "configs.txt"
KEPT = Path(__file__).resolve().parent / "kept_runs"
NOT_CONFIGURATIONS = {"__init__", "base", "models", "common"}
SPECS = sorted(
    file.relative_to(ROOT / "configs").as_posix().removesuffix(".py")
    for file in (ROOT / "configs").rglob("*.py")
    if file.stem not in NOT_CONFIGURATIONS
)
SEEDS = [f"{spec}:seed" for spec in SPECS if spec.startswith("dpo/") and spec != "dpo/smollm2"]


def _build(spec: str) -> config.Config:
    file, _, variant = spec.partition(":")
    cfg = config.build(config_file.load(f"configs/{file}.py{variant and f':{variant}'}", root=ROOT))
    validation.validate(cfg)
    return cfg


def test_configurations_are_unchanged() -> None:
    sections = {"defaults": [f"{path} = {value!r}" for path, value in config.flatten(config.defaults("")).items()]}
    for spec in (*SPECS, *SEEDS):
        cfg = _build(spec)
        sections[spec] = config.diff(config.defaults(cfg.recipe), config.to_dict(cfg))
    text = "\n".join(f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), "changed on purpose? make golden, and say why in the commit"


# Configurations as run folders of 2026-11-23 hold them, 161 keys, with the digests that their checkpoints record.


@pytest.mark.parametrize("name", ["squad", "dpo", "ttt"])
def test_kept_run_of_earlier_code_is_read_and_keeps_its_identity(name: str) -> None:
    kept = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    cfg = config.read_saved(kept["config"])
    validation.validate(cfg)
    assert config.identity(cfg) == kept["identity"]
    spec = {"squad": "squad", "dpo": "dpo/phi3:seed", "ttt": "ttt/ttt_350m"}[name]
    built = _build(spec)
    assert config.identity(built) == kept["identity"], "a run of the file is resumed"
    assert dataclasses.replace(cfg, eval=built.eval) == built


@pytest.mark.parametrize(
    ("name", "path", "value", "found"),
    [
        ("squad", "loss.chunk", 64, ("compute.logits_chunk", 64)),
        ("ttt", "ttt.loss_chunk", 32, ("compute.logits_chunk", 32)),
        ("dpo", "dpo.held_out", 0.25, ("data.held_out", 0.25)),
        ("dpo", "dpo.reference", "kept", ("dpo.reference", "cached")),
        ("squad", "train.alarm", "tell", ("train.alarm", "warn")),
        ("squad", "eval.layers", "apart", ("eval.layers", "unstacked")),
        ("squad", "train.keep", 9, None),
        ("squad", "eval.slots", [1], None),
    ],
)
def test_value_of_a_kept_run_is_translated(name: str, path: str, value: object, found: tuple | None) -> None:
    kept = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))["config"]
    before = config.flatten(config.to_dict(config.read_saved(kept)))
    section, key = path.split(".")
    kept[section][key] = value
    after = config.flatten(config.to_dict(config.read_saved(kept)))
    assert {key: value for key, value in after.items() if before[key] != value} == dict([found] if found else [])


@pytest.mark.parametrize(
    ("path", "value"),
    [("loss.first", 0.5), ("adapter.calibration", "always"), ("selfmade.ffn", 99), ("stages.answer.share", 3.0)],
)
def test_removed_key_that_decided_a_kept_run_is_refused(path: str, value: object) -> None:
    kept = json.loads((KEPT / "squad.json").read_text(encoding="utf-8"))["config"]
    *sections, key = path.split(".")
    at = kept
    for section in sections:
        at = at[section]
    at[key] = value
    with pytest.raises(UserError, match=rf"config\.{path} = {value!r}: was removed"):
        config.read_saved(kept)
