import re
from typing import Any

import pytest

from configs import base
from lw_jax import recipes
from lw_jax.core import config, validation
from lw_jax.core.config_keys import check
from lw_jax.core.config_sections import READ_BY
from lw_jax.core.errors import UserError


def _values() -> Any:
    values = base.get_config()
    values.llms.llama = base.llm("folder/llama")
    values.llms.qwen = base.llm("selfmade:qwen")
    values.encoder.source = "folder/encoder"
    return values


# The key that is named, its value, and what else is set.
BAD = [
    ("llms", "'llama', 'qwen'", {"recipe": "ttt"}),
    *(("prompt.user", user, {}) for user in (
        "{context!r} {question}", "{context:>9} {question}", "{question} {context}", "{context} {question} {name}",
        "{context} {question")),
    ("data.cards", 10**12, {}),
    ("seed", -1, {}),
    ("recipe", "latentwir", {}),
    ("llms.llama.source", "", {}),
    ("llms.llama.sha256", "12ab", {}),
    ("encoder.source", "", {}),
    ("encoder.source", "folder/encoder", {"encoder.kind": "bytes"}),
    ("encoder.mask", "causal", {"encoder.kind": "bert"}),
    ("encoder.states", 2, {"adapter.kind": "kv"}),
    ("encoder.slots", 0, {}),
    ("encoder.slots", 17, {"encoder.window": 16}),
    ("prompt.system", "Be short.", {}),
    ("data.validation", "a.jsonl", {"data.train": "a.jsonl"}),
    ("data.train", "", {}),
    ("data.columns", ("context:a",), {}),
    ("data.columns", ("contxt:a",), {}),
    ("data.columns", ("context:a", "context:b"), {}),
    ("data.question_tokens", 512, {}),
    ("loss.ce", 0.0, {}),
    ("train.micro_batch", 33, {}),
    ("train.global_batch", 3, {"mesh.placement": "replicate", "mesh.data": 4}),
    ("mesh.placement", "tensor", {}),
    ("mesh.model", 2, {}),
    ("mesh.model", 2, {"mesh.placement": "fsdp"}),
    ("mesh.placement", "fsdp", {"mesh.data": 1}),
    ("mesh.data", 2, {"mesh.placement": "hybrid4"}),
    ("compute.remat", "dots", {}),
    ("eval.rows", ("text", "latent"), {}),
    ("eval.rows", ("text", "text"), {}),
    ("stages.pretrain.lengths", (), {"stages.pretrain.share": 1.0}),
    ("stages.pretrain.share", 0.5, {"stages.align.share": 0.6}),
    ("stages.answer.bits", (3,), {}),
    ("data.passages", "more.txt", {}),
    ("message.bytes", 16, {}),
    ("data.held_out", 0.1, {}),
    ("stages.answer.slots", (33,), {}),
    ("stages.answer.ratios", (4,), {"stages.answer.slots": (8,)}),
    ("lora.rank", 8, {}),
    ("encoder.texts", 100, {}),
    *(("encoder.rank", 8, {"encoder.source": "", "encoder.kind": kind}) for kind in ("bytes", "cache")),
]  # fmt: skip


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


def test_one_refusal_has_the_flags_that_reset_all_keys_without_effect() -> None:
    values = _values()
    values.update_from_flattened_dict({"encoder.kind": "bytes", "encoder.states": 2, "stages.answer.bits": (8,)})
    with pytest.raises(UserError, match="--config.encoder.source= --config.encoder.states=0$"):
        validation.validate(config.build(values))
    values.update_from_flattened_dict(config.unread(config.build(values)))
    validation.validate(config.build(values))
    assert values.stages.answer.bits == (8,)


def test_every_row_of_who_reads_a_key_names_keys_recipes_and_kinds_that_exist() -> None:
    entries = {entry.path: entry.key for entry in config.entries()}
    known = {*entries["recipe"].choices, *entries["encoder.kind"].choices}
    first = [next((regex for regex, _ in READ_BY if re.fullmatch(regex, path)), "") for path in entries]
    assert {regex for regex, _ in READ_BY} == {*first} - {""}
    assert all({*names} < known for _, names in READ_BY)


def test_number_of_keys_stays_small() -> None:
    """161 in November 2026; a new key replaces one that nobody varies."""
    assert len(list(config.entries())) <= 121


TEXT = {"recipe": "ttt", "data.train": "docstrings", "data.validation": ""}

BAD_TEXT = [
    ("ttt.width", 90, {}),
    ("stages.align.share", 0.5, {}),
    ("stages.answer.rate", 2.0, {}),
    ("ttt.width", 84, {}),  # heads of width 7
    ("ttt.length", 127, {"ttt.segments": 2}),
    ("ttt.form", "kernel", {"ttt.segments": 2}),
    ("ttt.form", "kernel", {"ttt.inner": "mlp"}),
    ("ttt.form", "kernel", {"ttt.chunk": 24}),
    ("data.held_out", 1.0, {}),
    ("data.held_out", 0.0, {}),
    ("ttt.vocab", 256, {}),
    ("mesh.placement", "tensor", {"mesh.model": 2}),
    ("mesh.placement", "split", {}),
    ("data.validation_limit", 5, {}),
    ("data.train", "cards", {}),
    ("data.validation", "docstrings", {}),
    ("data.columns", ("context:body",), {"data.train": "a.jsonl"}),
    ("train.alarm_step", 10, {}),
    ("encoder.width", 100, {}),
]


@pytest.mark.parametrize(("key", "value", "others"), BAD_TEXT, ids=str)
def test_impossible_language_model_is_refused_by_key_and_value(key: str, value: Any, others: dict[str, Any]) -> None:
    _refuse(base.get_config("ttt"), TEXT | {key: value} | others, key, value)
