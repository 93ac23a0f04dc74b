from typing import Any

import pytest

from configs import base
from lw_jax import recipes
from lw_jax.core import config, validation
from lw_jax.core.config_keys import check
from lw_jax.core.errors import UserError


def _values() -> Any:
    values = base.get_config()
    values.llms.llama = base.llm("folder/llama")
    values.llms.qwen = base.llm("selfmade:qwen")
    values.encoder.source = "folder/encoder"
    return values


GOOD = [
    {},
    {"encoder.kind": "bytes", "encoder.source": ""},
    {"mesh.placement": "tensor", "mesh.model": 2},
    {"mesh.placement": "fsdp", "mesh.data": 4},
    {"mesh.placement": "replicate", "mesh.data": 3, "train.micro_batch": 5},
    {"loss.ce": 0.0, "loss.kl": 1.0},
    {"data.train": "hub:a/b", "data.validation": "hub:a/b"},
    {"data.train": "folder", "data.validation": "folder", "data.columns": ("context:a.b:c", "is_impossible:")},
    {"llms.llama.template": "chat", "prompt.system": "Be short."},
    {"prompt.user": "{{x}} {context} {question}"},
]

# The key that is named, its value, and what else is set.
BAD = [
    ("llms", "'llama', 'qwen'", {"recipe": "ttt"}),
    *(("prompt.user", user, {}) for user in (
        "{context!r} {question}", "{context:>1000000000} {question}", "{context:{question}} {question}", "{context}",
        "{question} {context}", "{context} {context} {question}", "{context} {question} {name}",
        "{context.__class__} {question}", "{context} {question")),
    ("data.cards", 10**12, {}),
    ("train.steps", 10**18, {}),
    ("seed", -1, {}),
    ("optim.learning_rate", 1e300, {}),
    ("recipe", "latentwir", {}),
    ("llms.llama.weights", "fp8", {}),
    ("llms.llama.template", "chatml", {}),
    ("llms.llama.source", "", {}),
    ("llms.llama.source", "selfmade:gemma", {}),
    ("llms.llama.sha256", "12ab", {}),
    ("encoder.source", "", {}),
    ("encoder.source", "folder/encoder", {"encoder.kind": "bytes"}),
    ("encoder.states", 2, {"encoder.kind": "bert"}),
    ("encoder.mask", "causal", {"encoder.kind": "bert"}),
    ("encoder.rank", 4, {"encoder.kind": "bert"}),
    ("encoder.states", 2, {"adapter.kind": "kv"}),
    ("encoder.states", 2, {"encoder.pooling": "rare"}),
    ("encoder.slots", 0, {}),
    ("encoder.width", 4097, {}),
    ("encoder.slots", 17, {"encoder.window": 16}),
    ("prompt.system", "Be short.", {}),
    ("data.validation", "a.jsonl", {"data.train": "a.jsonl"}),
    ("data.train", "", {}),
    ("data.columns", ("context:a",), {}),
    ("data.columns", ("contxt:a",), {}),
    ("data.columns", ("context",), {}),
    ("data.columns", ("context:a", "context:b"), {}),
    ("data.question_tokens", 512, {}),
    ("loss.ce", 0.0, {}),
    ("optim.end_fraction", 1.5, {}),
    ("train.micro_batch", 33, {}),
    ("train.global_batch", 3, {"mesh.placement": "replicate", "mesh.data": 4}),
    ("mesh.data", -2, {}),
    ("mesh.placement", "tensor", {}),
    ("mesh.model", 2, {}),
    ("mesh.model", 2, {"mesh.placement": "fsdp"}),
    ("mesh.placement", "fsdp", {"mesh.data": 1}),
    ("mesh.data", 2, {"mesh.placement": "hybrid4"}),
    ("mesh.placement", "zero3", {}),
    ("compute.remat", "dots", {}),
    ("eval.rows", ("text", "latent"), {}),
    ("eval.rows", ("text", "text"), {}),
    ("eval.rows", (), {}),
    ("stages.pretrain.lengths", (), {"stages.pretrain.share": 1.0}),
    ("stages.pretrain.share", 0.5, {"stages.align.share": 0.6}),
    ("stages.pretrain.lengths", (8, 1), {}),
    ("stages.answer.bits", (3,), {}),
    ("data.held_out", 0.1, {}),
    ("stages.answer.slots", (33,), {}),
    ("stages.answer.ratios", (4, 4), {}),
    ("stages.answer.ratios", (4,), {"stages.answer.slots": (8,)}),
]  # fmt: skip


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_possible_configuration_passes(changes: dict[str, Any]) -> None:
    values = _values()
    values.update_from_flattened_dict(changes)
    validation.validate(config.build(values))


def _refuse(values: Any, changes: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        values.update_from_flattened_dict(changes)
        validation.validate(config.build(values))
    message = str(caught.value)
    assert message.startswith(f"config.{key} = ")
    assert any(str(part)[:40] in message for part in (value if isinstance(value, tuple) and value else [value]))


@pytest.mark.parametrize(("key", "value", "others"), BAD, ids=str)
def test_impossible_configuration_is_refused_by_key_and_value(key: str, value: Any, others: dict[str, Any]) -> None:
    _refuse(_values(), others if key == "llms" else {key: value} | others, key, value)


@pytest.mark.parametrize("name", ["", "Llama 3"])
def test_no_reader_and_one_whose_name_cannot_be_a_path_are_refused(name: str) -> None:
    values = base.get_config()
    if name:
        values.llms[name] = base.llm("folder/llama")
    _refuse(values, {"encoder.source": "folder/encoder"}, "llms", name)


def test_every_declared_choice_and_default_agree() -> None:
    """Every recipe's defaults are among a key's choices and within its range; recipe names those that exist."""
    for recipe in recipes.RECIPES:
        flat = config.flatten(config.defaults(recipe))
        for entry in config.entries():
            if "NAME" not in entry.path:
                check(entry.path, flat[entry.path], entry.hint, entry.key)
    (choices,) = (entry.key.choices for entry in config.entries() if entry.path == "recipe")
    assert set(choices) == set(recipes.RECIPES)


def test_number_of_keys_stays_small() -> None:
    """161 in November 2026; a new key replaces one that nobody varies."""
    assert len(list(config.entries())) <= 121


TEXT = {"recipe": "ttt", "data.train": "docstrings", "data.validation": ""}

GOOD_TEXT = [
    {},
    {"ttt.segments": 3},
    {"ttt.length": 127},
    {"ttt.form": "full"},
    {"ttt.tokenizer": "some/folder", "ttt.vocab": 50257},
    {"data.validation": "other.txt", "data.held_out": 0.0},
    {"mesh.placement": "fsdp", "mesh.data": 8},
    {"optim.decays": "all"},
    {"compute.remat": "dots"},
]

BAD_TEXT = [
    ("ttt.width", 90, {}),
    ("ttt.width", 84, {}),  # heads of width 7
    ("ttt.length", 127, {"ttt.segments": 2}),
    ("ttt.form", "full", {"ttt.segments": 2}),
    ("data.held_out", 1.0, {}),
    ("data.held_out", 0.0, {}),
    ("ttt.vocab", 256, {}),
    ("mesh.placement", "tensor", {"mesh.model": 2}),
    ("mesh.placement", "split", {}),
    ("data.validation_limit", 5, {}),
    ("data.train", "cards", {}),
    ("data.validation", "docstrings", {}),
    ("data.columns", ("context:body",), {"data.train": "a.jsonl"}),
    ("ttt.inner", "rnn", {}),
    ("ttt.backbone", "mamba2", {}),
    ("ttt.layers", 0, {}),
]


@pytest.mark.parametrize("changes", GOOD_TEXT, ids=str)
def test_possible_language_model_passes(changes: dict[str, Any]) -> None:
    values = base.get_config("ttt")
    values.update_from_flattened_dict(TEXT | changes)
    validation.validate(config.build(values))


@pytest.mark.parametrize(("key", "value", "others"), BAD_TEXT, ids=str)
def test_impossible_language_model_is_refused_by_key_and_value(key: str, value: Any, others: dict[str, Any]) -> None:
    _refuse(base.get_config("ttt"), TEXT | {key: value} | others, key, value)
