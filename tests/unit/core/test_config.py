import functools
import json
from typing import Any

import pytest

from configs import base
from lw_jax.core import config
from lw_jax.core.errors import UserError


def _values() -> Any:
    c = base.get_config()
    c.llms.llama = base.llm("folder/llama")
    c.encoder.source = "folder/encoder"
    return c


def test_json_round_trip_builds_the_same_configuration() -> None:
    cfg = config.build(_values())
    assert config.flatten(config.to_dict(cfg)) == config.flatten(_values()), "every key of base is a field"
    assert config.build(json.loads(json.dumps(config.to_dict(cfg)))) == cfg
    assert isinstance(cfg.eval.rows, tuple)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.stepz", 3),
        ("train.steps", 2.0),
        ("train.steps", None),
        ("optim.learning_rate", float("nan")),
        ("eval.rows", "text"),
        ("llms.llama.weigths", "fp32"),
        ("recipe", 10**5000),  # Python writes no more than 4,300 digits
        ("seed", 2**63),
        ("stages.answer.slots", (1, 10**5000)),
        ("train", 3),
        ("train.steps", "a\ud800"),  # half a surrogate pair is no UTF-8, which msgspec reads a number from
        ("data.train", "a\ud800"),
    ],
    ids=range(12),
)
def test_unknown_key_and_value_of_another_type_are_refused_with_their_path(path: str, value: Any) -> None:
    values = _values().to_dict()
    *sections, key = path.split(".")
    node = functools.reduce(lambda node, name: node[name], sections, values)
    node[key] = value
    if value is None:
        del node[key]
    with pytest.raises(UserError, match=rf"config\.{path}"):
        config.build(values)


KEYS = [
    ("train.log_every", 7, False),
    ("train.log_to", ("wandb",), False),
    ("compute.logits_chunk", 7, False),
    ("train.micro_batch", 8, False),
    ("mesh.placement", "fsdp", False),
    ("compute.remat", "full", False),
    ("eval.rows", ("text",), False),
    ("recipe", "ttt", True),
    ("seed", 7, True),
    ("llms.llama.weights", "bf16", True),
    ("encoder.slots", 7, True),
    ("prompt.anchor", "?", True),
    ("data.train", "x.jsonl", True),
    ("optim.learning_rate", 7e-4, True),
    ("train.global_batch", 64, True),
    ("compute.dtype", "bf16", True),
]


@pytest.mark.parametrize(("path", "value", "meant"), KEYS)
def test_key_of_the_result_changes_the_meaning_and_the_identity(path: str, value: Any, meant: bool) -> None:
    old, values = config.build(_values()), _values()
    values.update_from_flattened_dict({path: value})
    new = config.build(values)
    assert (config.meaning(new) != config.meaning(old)) == meant
    assert (config.identity(new) != config.identity(old)) == meant


def test_plans_of_a_causal_encoder_and_of_one_without_mask_are_two() -> None:
    values = _values()
    shape = config.shape(config.build(values))
    values.encoder.mask = "causal"
    assert config.shape(config.build(values)) != shape


def test_diff_names_changed_added_and_missing_values() -> None:
    old = {"a": {"x": 1, "y": (2, 3)}, "gone": "g"}
    new = {"a": {"x": 5, "y": [2, 3]}, "added": None}
    assert config.diff(old, new) == ["a.x: 1 -> 5", "added: (absent) -> None", "gone: 'g' -> (absent)"]
