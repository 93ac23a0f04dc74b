from typing import Any

import pytest

from configs import base
from lw_jax import recipes
from lw_jax.core import config, validation
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
    {"mesh.placement": "split", "mesh.model": 2},
    {"mesh.placement": "hybrid3"},
    {"loss.ce": 0.0, "loss.kl": 1.0},
    {"data.train": "hub:a/b", "data.validation": "hub:a/b"},
    {"llms.llama.template": "chat", "prompt.system": "Be short."},
    {"prompt.user": "{{x}} {context} {question}"},
    {"eval.rows": ("latents",)},
]

BAD = [
    ({"recipe": "ttt"}, "llms = .*'llama', 'qwen'.*name no reader"),
    ({"prompt.user": "{context!r} {question}"}, "prompt.user = .*it needs {context} once"),
    ({"prompt.user": "{context:>1000000000} {question}"}, "prompt.user = .*it needs {context} once"),
    ({"prompt.user": "{context:{question}} {question}"}, "prompt.user = .*it needs {context} once"),
    ({"data.cards": 10**12}, "data.cards = 10+: at most 10,000,000"),
    ({"train.steps": 10**18}, "train.steps = 10+: at most 2,147,483,647"),
    ({"seed": -(2**31)}, "seed = -2147483648: at most"),
    ({"optim.learning_rate": 1e300}, r"optim.learning_rate = 1e\+300: at most 1e\+15"),
    ({"data.train": "a\ud800"}, r"data.train = 'a\\ud800': half a surrogate pair"),
    ({"prompt.anchor": "x" * 10**6}, "prompt.anchor = 'x+...': 1,000,000 characters"),
    ({"recipe": "latentwir"}, "recipe = 'latentwir'.*Did you mean 'latentwire'"),
    ({"llms.llama.weights": "fp8"}, "llms.llama.weights = 'fp8': known are fp32, bf16, int8, nf4, awq, w8a8."),
    ({"llms.qwen.weights": "fp16"}, "llms.qwen.weights = 'fp16': known are fp32, bf16"),
    ({"llms.llama.template": "chatml"}, "llms.llama.template = 'chatml'.*'chat'"),
    ({"llms.llama.source": ""}, "llms.llama.source = ''"),
    ({"llms.llama.source": "selfmade:gemma"}, "llms.llama.source = 'selfmade:gemma'.*selfmade:llama, selfmade:qwen"),
    ({"llms.llama.sha256": "12ab"}, "llms.llama.sha256 = '12ab': 64"),
    ({"encoder.kind": "byte"}, "encoder.kind = 'byte'"),
    ({"encoder.source": ""}, "encoder.source = ''.*kind 'bytes'"),
    ({"encoder.kind": "bytes"}, "encoder.source = 'folder/encoder'"),
    ({"encoder.kind": "bytes", "encoder.source": "", "encoder.sha256": "0" * 64}, "encoder.source = '0"),
    ({"encoder.pooling": "max"}, "encoder.pooling = 'max'"),
    ({"encoder.slots": 0}, "encoder.slots = 0: it must be above 0"),
    ({"encoder.width": -1}, "encoder.width = -1"),
    ({"encoder.window": 0}, "encoder.window = 0"),
    ({"encoder.slots": 17, "encoder.window": 16}, "encoder.slots = 17: more slots than encoder.window = 16"),
    ({"encoder.rate": -0.1}, "encoder.rate = -0.1"),
    ({"encoder.layers": -1}, "encoder.layers = -1"),
    ({"adapter.rate": -1.0}, "adapter.rate = -1.0"),
    ({"adapter.calibration": "never"}, "adapter.calibration = 'never'"),
    ({"prompt.user": "{context}"}, "prompt.user = .*{context} once and then {question} once"),
    ({"prompt.user": "{question} {context}"}, "prompt.user"),
    ({"prompt.user": "{context} {context} {question}"}, "prompt.user"),
    ({"prompt.user": "{context} {question} {name}"}, "prompt.user"),
    ({"prompt.user": "{context!r} {question}"}, "prompt.user"),
    ({"prompt.user": "{context} {question:>1000000000}"}, "prompt.user"),
    ({"prompt.user": "{context.__class__} {question}"}, "prompt.user"),
    ({"data.cards": 10**30}, r"data.cards = 10+: a number below 2\^63"),
    ({"data.validation_cards": 10**8}, "data.validation_cards"),
    ({"prompt.user": "{context} {question"}, "prompt.user = .*expected '}'"),
    ({"prompt.system": "Be short."}, "prompt.system = 'Be short.'.*'chat'"),
    ({"data.overlong": "skip"}, "data.overlong = 'skip'"),
    ({"data.train": "a.jsonl", "data.validation": "a.jsonl"}, "data.validation = 'a.jsonl': it is the training file"),
    ({"data.train": ""}, "data.train = ''"),
    ({"data.answer_tokens": 1}, "data.answer_tokens = 1"),
    ({"data.question_tokens": 512}, "data.question_tokens = 512.*context_tokens = 512"),
    ({"data.train_limit": -1}, "data.train_limit = -1"),
    ({"loss.ce": 0.0}, "loss.ce = 0.0: kl, first and k are 0 as well"),
    ({"loss.kl": -1.0}, "loss.kl = -1.0"),
    ({"loss.temperature": 0.0}, "loss.temperature = 0.0"),
    ({"optim.learning_rate": 0.0}, "optim.learning_rate = 0.0"),
    ({"optim.end_fraction": 1.5}, "optim.end_fraction = 1.5"),
    ({"optim.end_fraction": -0.5}, "optim.end_fraction = -0.5"),
    ({"optim.b1": 1.0}, "optim.b1 = 1.0"),
    ({"train.steps": 0}, "train.steps = 0"),
    ({"train.micro_batch": 5}, "train.micro_batch = 5: it must divide train.global_batch = 32"),
    ({"mesh.placement": "replicate", "train.global_batch": 32, "mesh.data": 3}, "train.global_batch = 32.*= 3"),
    ({"mesh.placement": "replicate", "train.micro_batch": 16, "mesh.data": 4}, "train.global_batch = 32.*= 64"),
    ({"mesh.data": 0}, "mesh.data = 0"),
    ({"mesh.data": -2}, "mesh.data = -2"),
    ({"mesh.model": 0}, "mesh.model = 0"),
    ({"mesh.placement": "tensor"}, "mesh.placement = 'tensor': it splits readers over mesh.model, which is 1"),
    ({"mesh.model": 2}, "mesh.model = 2: placement 'auto' leaves that axis idle"),
    ({"mesh.placement": "fsdp", "mesh.model": 2}, "mesh.model = 2: placement 'fsdp'"),
    ({"mesh.placement": "fsdp", "mesh.data": 1}, "mesh.placement = 'fsdp'.*mesh.data, which is 1"),
    ({"mesh.data": 2}, "mesh.data = 2: placement 'auto' decides it itself"),
    ({"mesh.placement": "hybrid4", "mesh.data": 2}, "mesh.data = 2: placement 'hybrid4'"),
    ({"mesh.target_utilisation": 1.1}, "mesh.target_utilisation = 1.1"),
    ({"mesh.memory_gb": -1.0}, "mesh.memory_gb = -1.0"),
    ({"mesh.placement": "zero3"}, "mesh.placement = 'zero3'"),
    ({"compute.dtype": "fp16"}, "compute.dtype = 'fp16'"),
    ({"compute.remat": "half"}, "compute.remat = 'half'"),
    (
        {"compute.remat": "dots"},
        "compute.remat = 'dots': only a TTT layer knows it; in a decoder 'none' keeps the same",
    ),
    ({"loss.chunk": -1}, "loss.chunk = -1"),
    ({"eval.rows": ("text", "latent")}, "eval.rows = 'latent'.*Did you mean 'latents'"),
    ({"eval.rows": ("text", "text")}, "eval.rows = .*each once"),
    ({"eval.rows": ()}, "eval.rows = .*one or more"),
    ({"eval.batch": 0}, "eval.batch = 0"),
    ({"selfmade.kv_heads": 3}, "selfmade.kv_heads = 3: it must divide selfmade.heads = 4"),
    ({"selfmade.width": 100}, "selfmade.width = 100"),
    ({"seed": -1}, "seed = -1"),
    ({"stages.answer.share": 0.0}, "stages.answer.share = 0.0: every stage's share is 0"),
    ({"stages.answer.answer": 0.0}, "stages.answer.answer = 0.0: the stage has no task"),
    ({"stages.pretrain.share": 1.0, "stages.pretrain.lengths": ()}, "stages.pretrain.lengths = "),
    ({"stages.answer.rate": 0.0}, "stages.answer.rate = 0.0"),
    ({"stages.answer.slots": (33,)}, "stages.answer.slots = .*from 1 to encoder.slots = 32"),
    ({"stages.answer.widths": (64, 64)}, "stages.answer.widths = .*each at most once"),
    ({"eval.bits": (3,)}, "eval.bits = .*16, 8, 6, 4, 2 bits"),
    ({"eval.curve": "em"}, "eval.curve = 'em'"),
    ({"train.alarm": "shout"}, "train.alarm = 'shout'"),
    ({"loss.teacher_k": -1}, "loss.teacher_k = -1"),
    ({"prompt.question": "both"}, "prompt.question = 'both'"),
    ({"encoder.kind": "bert", "encoder.source": ""}, "encoder.source = '': encoder.kind 'bert'"),
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
    with pytest.raises(UserError, match=r"config\.llms = \{\}: no reader is named"):
        validation.validate(config.build(values))


def test_reader_whose_name_cannot_be_a_path_is_refused() -> None:
    values = base.get_config()
    values.encoder.source = "folder/encoder"
    values.llms["Llama 3"] = base.llm("folder/llama")
    with pytest.raises(UserError, match="config.llms = 'Llama 3'"):
        validation.validate(config.build(values))


def test_every_rule_names_an_existing_key() -> None:
    flat = config.flatten(config.to_dict(_build({})))
    named = {*validation.CHOICES, *validation.ABOVE_ZERO, *validation.NOT_BELOW_ZERO}
    exact = {path for path in named if "*" not in path}
    assert exact <= flat.keys()


def test_every_recipe_may_be_chosen() -> None:
    assert set(validation.CHOICES["recipe"]) == set(recipes.RECIPES)


TEXT = {"recipe": "ttt", "data.train": "docstrings", "data.validation": ""}

GOOD_TEXT = [
    {},
    {"ttt.segments": 3},
    {"ttt.length": 127},
    {"ttt.form": "full"},
    {"ttt.vocab": 257},
    {"ttt.tokenizer": "some/folder", "ttt.vocab": 50257},
    {"data.validation": "other.txt", "ttt.held_out": 0.0},
    {"mesh.placement": "fsdp", "mesh.data": 8},
    {"optim.decays": "all"},
    {"compute.remat": "dots"},
]

BAD_TEXT = [
    ({"ttt.width": 90}, "ttt.width = 90: heads need an even width: a multiple of 2 x ttt.heads = 24"),
    ({"ttt.width": 84}, "ttt.width = 84"),  # heads of width 7
    ({"ttt.segments": 2, "ttt.length": 127}, "ttt.length = 127: .*a multiple of ttt.chunk = 16"),
    ({"ttt.segments": 2, "ttt.form": "full"}, "ttt.form = 'full'.*ttt.segments > 1"),
    ({"ttt.held_out": 1.0}, "ttt.held_out = 1.0: it is a share"),
    ({"ttt.held_out": 0.0}, "ttt.held_out = 0.0: nothing is held out"),
    ({"ttt.held_out": -0.1}, "ttt.held_out = -0.1"),
    ({"ttt.vocab": 256}, "ttt.vocab = 256: the tokenizer 'bytes' has 257"),
    ({"ttt.vocab": -1}, "ttt.vocab = -1"),
    ({"mesh.placement": "tensor", "mesh.model": 2}, "mesh.placement = 'tensor': one model that learns"),
    ({"mesh.placement": "split"}, "mesh.placement = 'split'"),
    ({"mesh.placement": "hybrid3"}, "mesh.placement = 'hybrid3'"),
    ({"data.train_limit": 5}, "data.train_limit = 5: a text has no examples to count"),
    ({"data.validation_limit": 5}, "data.validation_limit = 5"),
    ({"data.train": "cards"}, "data.train = 'cards': recipe 'ttt' reads texts"),
    ({"data.validation": "pairs"}, "data.validation = 'pairs': recipe 'ttt' reads texts"),
    ({"data.train": ""}, "data.train = ''"),
    ({"data.validation": "docstrings"}, "data.validation = 'docstrings': it is the training"),
    ({"data.train": "hub:a/b", "data.validation": "hub:a/b"}, "data.validation = 'hub:a/b': it is the training"),
    ({"ttt.inner": "rnn"}, "ttt.inner = 'rnn': known are linear, mlp"),
    ({"ttt.backbone": "mamba2"}, "ttt.backbone = 'mamba2'.*Did you mean 'mamba'"),
    ({"ttt.form": "fast"}, "ttt.form = 'fast'"),
    ({"optim.decays": "some"}, "optim.decays = 'some': known are matrices, all"),
    *(
        ({f"ttt.{name}": 0}, f"ttt.{name} = 0")
        for name in ("layers", "width", "heads", "ffn", "chunk", "table_multiple", "length", "segments", "unroll")
    ),
    ({"ttt.unroll_layers": 0}, "ttt.unroll_layers = 0"),
    ({"ttt.inner_rate": 0.0}, "ttt.inner_rate = 0.0"),
    ({"ttt.inner_start": 0.0}, "ttt.inner_start = 0.0"),
    ({"ttt.loss_chunk": -1}, "ttt.loss_chunk = -1"),
    ({"ttt.held_out_length": -1}, "ttt.held_out_length = -1"),
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
