from typing import Any

import pytest

from configs import base
from lw_jax import recipes
from lw_jax.core import config, validation
from lw_jax.core.config_keys import check
from lw_jax.core.errors import UserError


def _build(changes: dict[str, Any]) -> config.Config:
    values = base.get_config()
    values.llms.llama = base.llm("folder/llama")
    values.llms.qwen = base.llm("selfmade:qwen")
    values.encoder.source = "folder/encoder"
    values.update_from_flattened_dict(changes)
    return config.build(values)


GOOD = [
    {},
    {"encoder.kind": "bytes", "encoder.source": ""},
    {"mesh.placement": "tensor", "mesh.model": 2},
    {"mesh.placement": "fsdp", "mesh.data": 4},
    {"mesh.placement": "replicate", "mesh.data": 3, "train.micro_batch": 5},
    {"mesh.placement": "split", "mesh.model": 2},
    {"mesh.placement": "hybrid3"},
    {"loss.ce": 0.0, "loss.kl": 1.0},
    {"data.train": "hub:a/b", "data.validation": "hub:a/b"},
    {"data.train": "folder", "data.validation": "folder", "data.columns": ("context:a.b:c", "is_impossible:")},
    {"data.passages": "a.parquet", "data.columns": ("text:body", "system:")},
    {"llms.llama.template": "chat", "prompt.system": "Be short."},
    {"prompt.user": "{{x}} {context} {question}"},
    {"eval.rows": ("latents",)},
]

BAD = [
    ({"recipe": "ttt"}, "llms = .*'llama', 'qwen'.*"),
    ({"prompt.user": "{context!r} {question}"}, "prompt.user = .*{context} once"),
    ({"prompt.user": "{context:>1000000000} {question}"}, "prompt.user = .*{context} once"),
    ({"prompt.user": "{context:{question}} {question}"}, "prompt.user = .*{context} once"),
    ({"data.cards": 10**12}, "data.cards = 10+"),
    ({"train.steps": 10**18}, "train.steps = 10+"),
    ({"seed": -(2**31)}, "seed = -2147483648"),
    ({"optim.learning_rate": 1e300}, r"optim.learning_rate = 1e\+300"),
    ({"data.train": "a\ud800"}, r"data.train = 'a\\ud800'"),
    ({"prompt.anchor": "x" * 10**6}, r"prompt.anchor = 'x+\.\.\.: .*100000"),
    ({"recipe": "latentwir"}, "recipe = 'latentwir'.*Did you mean 'latentwire'"),
    ({"llms.llama.weights": "fp8"}, "llms.llama.weights = 'fp8': .*fp32, bf16, int8, nf4, awq, w8a8"),
    ({"llms.qwen.weights": "fp16"}, "llms.qwen.weights = 'fp16'"),
    ({"llms.llama.template": "chatml"}, "llms.llama.template = 'chatml'.*'chat'"),
    ({"llms.llama.source": ""}, "llms.llama.source = ''"),
    ({"llms.llama.source": "selfmade:gemma"}, "llms.llama.source = 'selfmade:gemma'.*selfmade:llama, selfmade:qwen"),
    ({"llms.llama.sha256": "12ab"}, "llms.llama.sha256 = '12ab'"),
    ({"encoder.kind": "byte"}, "encoder.kind = 'byte'"),
    ({"encoder.source": ""}, "encoder.source = ''.*kind 'bytes'"),
    ({"encoder.kind": "bytes"}, "encoder.source = 'folder/encoder'"),
    ({"encoder.kind": "bytes", "encoder.source": "", "encoder.sha256": "0" * 64}, "encoder.source = '0"),
    ({"encoder.pooling": "max"}, "encoder.pooling = 'max'"),
    ({"encoder.kind": "bert", "encoder.states": 2}, "encoder.states = 2.*'lm'.*'bert'"),
    ({"encoder.kind": "bert", "encoder.mask": "causal"}, "encoder.mask = 'causal'.*'lm'.*'bert'"),
    ({"encoder.states": 2, "adapter.kind": "kv"}, "encoder.states = 2.*'rare'"),
    ({"encoder.states": 2, "encoder.pooling": "rare"}, "encoder.states = 2.*adapter.kind 'kv'"),
    ({"encoder.kind": "bert", "encoder.rank": 4}, "encoder.rank = 4.*'lm'.*'bert'"),
    ({"encoder.slots": 0}, "encoder.slots = 0.*above 0"),
    ({"encoder.width": -1}, "encoder.width = -1"),
    ({"encoder.width": 4097}, "encoder.width = 4097"),
    ({"encoder.window": 0}, "encoder.window = 0"),
    ({"encoder.slots": 17, "encoder.window": 16}, "encoder.slots = 17.*encoder.window = 16"),
    ({"encoder.rate": -0.1}, "encoder.rate = -0.1"),
    ({"encoder.layers": -1}, "encoder.layers = -1"),
    ({"prompt.user": "{context}"}, "prompt.user = .*{context} once and then {question} once"),
    ({"prompt.user": "{question} {context}"}, "prompt.user"),
    ({"prompt.user": "{context} {context} {question}"}, "prompt.user"),
    ({"prompt.user": "{context} {question} {name}"}, "prompt.user"),
    ({"prompt.user": "{context!r} {question}"}, "prompt.user"),
    ({"prompt.user": "{context} {question:>1000000000}"}, "prompt.user"),
    ({"prompt.user": "{context.__class__} {question}"}, "prompt.user"),
    ({"data.cards": 10**30}, "data.cards = 10+"),
    ({"prompt.user": "{context} {question"}, "prompt.user = .*expected '}'"),
    ({"prompt.system": "Be short."}, "prompt.system = 'Be short.'.*'chat'"),
    ({"data.overlong": "skip"}, "data.overlong = 'skip'"),
    ({"data.train": "a.jsonl", "data.validation": "a.jsonl"}, "data.validation = 'a.jsonl'"),
    ({"data.train": "a.parquet", "data.validation": "a.parquet"}, "data.validation = 'a.parquet'"),
    ({"data.train": ""}, "data.train = ''"),
    ({"data.columns": ("context:a",)}, r"data.columns = \('context:a',\): .*no source has columns"),
    ({"data.columns": ("contxt:a",)}, "data.columns = 'contxt:a': .*Did you mean 'context'"),
    ({"data.columns": ("system:a",)}, "data.columns = 'system:a': must be FIELD:COLUMN"),
    ({"data.columns": ("context",)}, "data.columns = 'context': must be FIELD:COLUMN"),
    ({"data.columns": ("context:a", "context:b")}, "data.columns = .*each field once"),
    ({"data.answer_tokens": 1}, "data.answer_tokens = 1"),
    ({"data.question_tokens": 512}, "data.question_tokens = 512.*context_tokens = 512"),
    ({"loss.ce": 0.0}, "loss.ce = 0.0.*loss.kl"),
    ({"loss.kl": -1.0}, "loss.kl = -1.0"),
    ({"optim.learning_rate": 0.0}, "optim.learning_rate = 0.0"),
    ({"optim.end_fraction": 1.5}, "optim.end_fraction = 1.5"),
    ({"optim.end_fraction": -0.5}, "optim.end_fraction = -0.5"),
    ({"train.steps": 0}, "train.steps = 0"),
    ({"train.micro_batch": 33}, "train.micro_batch = 33.*train.global_batch = 32"),
    ({"mesh.placement": "replicate", "train.global_batch": 3, "mesh.data": 4}, "train.global_batch = 3.*mesh.data = 4"),
    ({"mesh.data": 0}, "mesh.data = 0"),
    ({"mesh.data": -2}, "mesh.data = -2"),
    ({"mesh.model": 0}, "mesh.model = 0"),
    ({"mesh.placement": "tensor"}, "mesh.placement = 'tensor'.*mesh.model"),
    ({"mesh.model": 2}, "mesh.model = 2.*'auto'"),
    ({"mesh.placement": "fsdp", "mesh.model": 2}, "mesh.model = 2.*'fsdp'"),
    ({"mesh.placement": "fsdp", "mesh.data": 1}, "mesh.placement = 'fsdp'.*mesh.data"),
    ({"mesh.data": 2}, "mesh.data = 2.*'auto'"),
    ({"mesh.placement": "hybrid4", "mesh.data": 2}, "mesh.data = 2.*'hybrid4'"),
    ({"mesh.target_utilisation": 1.1}, "mesh.target_utilisation = 1.1"),
    ({"mesh.memory_gb": -1.0}, "mesh.memory_gb = -1.0"),
    ({"mesh.placement": "zero3"}, "mesh.placement = 'zero3'"),
    ({"compute.dtype": "fp16"}, "compute.dtype = 'fp16'"),
    ({"compute.remat": "half"}, "compute.remat = 'half'"),
    (
        {"compute.remat": "dots"},
        "compute.remat = 'dots'.*'latentwire'",
    ),
    ({"compute.logits_chunk": -1}, "compute.logits_chunk = -1"),
    ({"eval.rows": ("text", "latent")}, "eval.rows = 'latent'.*Did you mean 'latents'"),
    ({"eval.rows": ("text", "text")}, "eval.rows = .*each once"),
    ({"eval.rows": ()}, "eval.rows = .*one or more"),
    ({"eval.batch": 0}, "eval.batch = 0"),
    ({"selfmade.width": 100}, "selfmade.width = 100"),
    ({"seed": -1}, "seed = -1"),
    ({"stages.pretrain.share": 1.0, "stages.pretrain.lengths": ()}, "stages.pretrain.lengths = "),
    ({"stages.align.share": 0.6, "stages.pretrain.share": 0.5}, "stages.pretrain.share = 0.5.*stages.align.share"),
    ({"stages.pretrain.share": 1.5}, "stages.pretrain.share = 1.5.*at most 1"),
    ({"stages.pretrain.lengths": (8, 1)}, r"stages.pretrain.lengths = \(8, 1\).*at least 2"),
    ({"stages.answer.bits": (3,)}, "stages.answer.bits = .*16, 8, 6, 4, 2"),
    ({"data.held_out": 0.1}, "data.held_out = 0.1"),
    ({"stages.answer.rate": 0.0}, "stages.answer.rate = 0.0"),
    ({"stages.answer.slots": (33,)}, "stages.answer.slots = .*from 1 to encoder.slots = 32"),
    ({"encoder.ratio": -1}, "encoder.ratio = -1"),
    ({"stages.answer.ratios": (4, 4)}, "stages.answer.ratios = .*once"),
    ({"stages.answer.ratios": (4,), "stages.answer.slots": (8,)}, r"stages.answer.ratios = \(4,\).*answer.slots"),
    ({"stages.answer.widths": (64, 64)}, "stages.answer.widths = .*once"),
    ({"eval.curve": "em"}, "eval.curve = 'em'"),
    ({"train.alarm": "shout"}, "train.alarm = 'shout'"),
    ({"loss.teacher_k": -1}, "loss.teacher_k = -1"),
    ({"encoder.kind": "bert", "encoder.source": ""}, "encoder.source = ''.*'bert'"),
]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_possible_configuration_passes(changes: dict[str, Any]) -> None:
    validation.validate(_build(changes))


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[str(changes) for changes, _ in BAD])
def test_impossible_configuration_is_refused_by_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"config\.{message}"):
        validation.validate(_build(changes))


def test_configuration_without_a_reader_is_refused() -> None:
    values = base.get_config()
    values.encoder.source = "folder/encoder"
    with pytest.raises(UserError, match=r"config\.llms = \{\}"):
        validation.validate(config.build(values))


def test_reader_whose_name_cannot_be_a_path_is_refused() -> None:
    values = base.get_config()
    values.encoder.source = "folder/encoder"
    values.llms["Llama 3"] = base.llm("folder/llama")
    with pytest.raises(UserError, match="config.llms = 'Llama 3'"):
        validation.validate(config.build(values))


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
    {"ttt.vocab": 257},
    {"ttt.tokenizer": "some/folder", "ttt.vocab": 50257},
    {"data.validation": "other.txt", "data.held_out": 0.0},
    {"data.train": "hub:a/b", "data.validation": "hub:a/b"},
    {"mesh.placement": "fsdp", "mesh.data": 8},
    {"optim.decays": "all"},
    {"compute.remat": "dots"},
]

BAD_TEXT = [
    ({"ttt.width": 90}, "ttt.width = 90.*ttt.heads = 24"),
    ({"ttt.width": 84}, "ttt.width = 84"),  # heads of width 7
    ({"ttt.segments": 2, "ttt.length": 127}, "ttt.length = 127.*ttt.chunk = 16"),
    ({"ttt.segments": 2, "ttt.form": "full"}, "ttt.form = 'full'.*ttt.segments > 1"),
    ({"data.held_out": 1.0}, "data.held_out = 1.0.*below 1"),
    ({"data.held_out": 0.0}, "data.held_out = 0.0"),
    ({"data.held_out": -0.1}, "data.held_out = -0.1"),
    ({"ttt.vocab": 256}, "ttt.vocab = 256.*257"),
    ({"ttt.vocab": -1}, "ttt.vocab = -1"),
    ({"mesh.placement": "tensor", "mesh.model": 2}, "mesh.placement = 'tensor'"),
    ({"mesh.placement": "split"}, "mesh.placement = 'split'"),
    ({"mesh.placement": "hybrid3"}, "mesh.placement = 'hybrid3'"),
    ({"data.validation_limit": 5}, "data.validation_limit = 5"),
    ({"data.train": "cards"}, "data.train = 'cards'"),
    ({"data.validation": "pairs"}, "data.validation = 'pairs'"),
    ({"data.train": ""}, "data.train = ''"),
    ({"data.validation": "docstrings"}, "data.validation = 'docstrings'"),
    ({"data.columns": ("text:body",)}, r"data.columns = \('text:body',\): .*no source has columns"),
    (
        {"data.columns": ("context:body",), "data.train": "a.jsonl"},
        "data.columns = 'context:body': .*FIELD one of text",
    ),
    ({"ttt.inner": "rnn"}, "ttt.inner = 'rnn'.*linear, mlp"),
    ({"ttt.backbone": "mamba2"}, "ttt.backbone = 'mamba2'.*Did you mean 'mamba'"),
    ({"ttt.form": "fast"}, "ttt.form = 'fast'"),
    ({"optim.decays": "some"}, "optim.decays = 'some'.*matrices, all"),
    *(
        ({f"ttt.{name}": 0}, f"ttt.{name} = 0")
        for name in ("layers", "width", "heads", "ffn", "chunk", "table_multiple", "length", "segments")
    ),
    ({"ttt.unroll_layers": 0}, "ttt.unroll_layers = 0"),
    ({"ttt.inner_rate": 0.0}, "ttt.inner_rate = 0.0"),
    ({"compute.logits_chunk": -1}, "compute.logits_chunk = -1"),
]


def _build_text(changes: dict[str, Any]) -> config.Config:
    values = base.get_config("ttt")
    values.update_from_flattened_dict(TEXT | changes)
    return config.build(values)


@pytest.mark.parametrize("changes", GOOD_TEXT, ids=str)
def test_possible_language_model_passes(changes: dict[str, Any]) -> None:
    validation.validate(_build_text(changes))


@pytest.mark.parametrize(("changes", "message"), BAD_TEXT, ids=[str(changes) for changes, _ in BAD_TEXT])
def test_impossible_language_model_is_refused_by_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"config\.{message}"):
        validation.validate(_build_text(changes))
