import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import base
from lw_jax.core import config
from lw_jax.core.errors import UserError

PROJECT = Path(__file__).resolve().parents[3]


def _values() -> Any:
    c = base.get_config()
    c.llms.llama = base.llm("folder/llama")
    c.encoder.source = "folder/encoder"
    return c


def test_every_key_of_base_is_a_field_and_the_reverse() -> None:
    values = _values()
    cfg = config.build(values)
    assert config.flatten(config.to_dict(cfg)) == config.flatten(values)


def test_json_round_trip_builds_the_same_configuration() -> None:
    cfg = config.build(_values())
    assert config.build(json.loads(json.dumps(config.to_dict(cfg)))) == cfg
    assert isinstance(cfg.eval.rows, tuple)


def test_unknown_key_is_refused_with_the_nearest_one() -> None:
    values = _values()
    values.train.stepz = 3
    with pytest.raises(UserError, match=r"config\.train\.stepz .*'steps'"):
        config.build(values)


def test_unknown_key_of_a_reader_is_refused_with_its_name() -> None:
    values = _values()
    values.llms.llama.weigths = "fp32"
    with pytest.raises(UserError, match=r"config\.llms\.llama\.weigths .* 'weights'"):
        config.build(values)


def test_missing_key_is_refused_with_its_path() -> None:
    values = _values().to_dict()
    del values["optim"]["b2"]
    with pytest.raises(UserError, match=r"config\.optim\.b2 is missing"):
        config.build(values)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "steps", 2.0),
        ("train", "steps", True),
        ("train", "steps", "7"),
        ("optim", "learning_rate", "fast"),
        ("optim", "learning_rate", float("nan")),
        ("optim", "clip_norm", float("inf")),
        ("encoder", "kind", 3),
        ("eval", "rows", "text"),
        ("eval", "rows", (1, 2)),
    ],
)
def test_value_of_another_type_is_refused_with_its_path(section: str, key: str, value: Any) -> None:
    values = _values().to_dict()
    values[section][key] = value
    with pytest.raises(UserError, match=rf"config\.{section}\.{key} = "):
        config.build(values)


def test_number_that_no_file_holds_is_refused_with_its_path() -> None:
    values, huge = _values().to_dict(), 10**5000  # Python writes no more than 4,300 digits
    for key, value in (("seed", huge), ("seed", 2**63), ("recipe", huge)):
        with pytest.raises(UserError, match=rf"^config\.{key} = "):
            config.build(values | {key: value})
    with pytest.raises(UserError, match=r"^config\.stages\.answer\.slots = "):
        values["stages"]["answer"]["slots"] = (1, huge)
        config.build(values)


@pytest.mark.parametrize("path", ["train", "llms"])
def test_value_in_the_place_of_a_section_is_refused(path: str) -> None:
    values = _values().to_dict()
    values[path] = 3
    with pytest.raises(UserError, match=rf"config\.{path} = 3"):
        config.build(values)


def test_whole_number_is_taken_for_a_float() -> None:
    values = _values()
    values.optim.update({"learning_rate": 1})
    assert type(config.build(values).optim.learning_rate) is float


def test_configuration_cannot_be_changed() -> None:
    cfg = config.build(_values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.train.steps = 3  # type: ignore[misc]


MECHANICAL = {
    "train.log_every": 7,
    "train.log_to": ("wandb",),
    "train.eval_every": 7,
    "train.checkpoint_every": 7,
    "compute.logits_chunk": 7,
    "train.micro_batch": 8,
    "mesh.placement": "fsdp",
    "mesh.data": 2,
    "compute.remat": "full",
    "eval.examples": 7,
    "eval.rows": ("text",),
}
MEANT = {
    "recipe": "ttt",
    "seed": 7,
    "llms.llama.source": "other",
    "llms.llama.weights": "bf16",
    "encoder.slots": 7,
    "prompt.anchor": "?",
    "data.train": "x.jsonl",
    "loss.kl": 2.0,
    "optim.learning_rate": 7e-4,
    "train.steps": 7,
    "train.global_batch": 64,
    "compute.dtype": "bf16",
    "selfmade.width": 64,
}


def _change(path: str, value: Any) -> config.Config:
    values = _values()
    values.update_from_flattened_dict({path: value})
    return config.build(values)


@pytest.mark.parametrize(("path", "value"), MECHANICAL.items())
def test_key_of_machine_or_report_keeps_the_meaning_and_changes_the_digest(path: str, value: Any) -> None:
    old, new = config.build(_values()), _change(path, value)
    assert config.meaning(new) == config.meaning(old)
    assert config.digest(new) != config.digest(old)


@pytest.mark.parametrize(("path", "value"), MEANT.items())
def test_key_of_the_result_changes_the_meaning(path: str, value: Any) -> None:
    old, new = config.build(_values()), _change(path, value)
    assert config.digest(config.meaning(new)) != config.digest(config.meaning(old))


def test_digest_is_the_same_in_another_process() -> None:
    code = (
        "from configs import base; from lw_jax.core import config; c = base.get_config();"
        "c.llms.llama = base.llm('folder/llama'); c.encoder.source = 'folder/encoder';"
        "print(config.digest(config.build(c)))"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=True).stdout
    assert out.strip() == config.digest(config.build(_values()))


def test_digest_does_not_know_the_order_of_keys() -> None:
    assert config.digest({"a": {"x": 1, "y": 2}}) == config.digest({"a": {"y": 2, "x": 1}})
    assert config.digest({"a": {"x": 1, "y": 2}}) != config.digest({"a": {"x": 2, "y": 1}})


def test_diff_names_changed_added_and_missing_values() -> None:
    old = {"a": {"x": 1, "y": (2, 3)}, "gone": "g"}
    new = {"a": {"x": 5, "y": [2, 3]}, "added": None}
    assert config.diff(old, new) == ["a.x: 1 -> 5", "added: (absent) -> None", "gone: 'g' -> (absent)"]
