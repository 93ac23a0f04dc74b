"""What the values of a configuration may be: checked once, at the door, before a device starts.

Every refusal names the key, its value, the rule and the remedy.
"""

import fnmatch
import math
import re
from typing import Any, NoReturn

from lw_jax.core.config import REMATS, Config, flatten, split_prompt, suggest, to_dict
from lw_jax.core.errors import UserError

# What a word may be, by path; "*" stands for every reader's name.
CHOICES = {
    "recipe": ("latentwire", "dpo", "ttt"),
    "llms.*.weights": ("fp32", "bf16", "int8", "nf4", "awq", "w8a8"),
    "llms.*.template": ("plain", "chat"),
    "encoder.kind": ("lm", "bert", "bytes"),
    "encoder.pooling": ("windows", "queries"),
    "adapter.start": ("random", "aligned"),
    "adapter.calibration": ("init", "always"),
    "prompt.question": ("text", "latents"),
    "data.overlong": ("refuse", "drop", "cut"),
    "train.alarm": ("stop", "tell"),
    "mesh.placement": ("auto", "single", "replicate", "fsdp", "tensor", "split", "hybrid3", "hybrid4"),
    "compute.dtype": ("fp32", "bf16"),
    "compute.remat": ("auto", "none", "dots", "full"),
    "dpo.loss": (
        *("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm", "apo_zero", "apo_down", "nca_pair", "bco_pair"),
        "sft",
    ),
    "dpo.reference": ("live", "kept"),
    "dpo.truncation": ("drop", "keep_start", "keep_end"),
    "ttt.inner": ("linear", "mlp"),
    "ttt.backbone": ("transformer", "mamba"),
    "ttt.form": ("scan", "full"),
    "optim.kind": ("adamw", "muon"),
    "optim.decays": ("matrices", "all"),
    "eval.curve": ("nll", "f1", "none"),
    "eval.layers": ("auto", "stacked", "apart"),
    "eval.rows": ("text", "latents", "shuffled", "zero", "none", "truncated"),
}
SMOOTHED = ("sigmoid", "robust")  # of dpo.loss, what knows label smoothing; the others leave it out
CHANNELS = ("stages.*.slots", "stages.*.widths", "stages.*.bits", "eval.slots", "eval.widths", "eval.bits")
BITS = (16, 8, 6, 4, 2)
WIDEST = 4096  # values of a message's slot: their rotation takes 64 MiB
MOST_VALUES = 2**24  # of a message: 64 MiB as fp32
MADE = ("cards", "pairs")  # the project makes them, each split apart
SELFMADE = ("llama", "qwen")
BYTES = 257  # UTF-8 and the end of a document
TTT_PLACEMENTS = ("auto", "single", "replicate", "fsdp")

# What takes time and memory in proportion, and what that is: a million cards take some 30 s and 1 GB.
AT_MOST = {"data.cards": 10_000_000, "data.validation_cards": 10_000_000}

ABOVE_ZERO = (
    *("encoder.slots", "encoder.width", "encoder.window", "encoder.windows", "adapter.hidden"),
    *("data.cards", "data.validation_cards", "data.facts", "data.context_tokens", "data.question_tokens"),
    *("loss.temperature", "loss.k_tokens", "stages.*.rate", "train.alarm_gap", "eval.resamples"),
    *("lora.rank", "lora.alpha", "dpo.beta", "dpo.max_length", "dpo.buckets"),
    *("ttt.layers", "ttt.width", "ttt.heads", "ttt.ffn", "ttt.chunk", "ttt.inner_rate", "ttt.inner_start"),
    *("ttt.table_multiple", "ttt.length", "ttt.segments", "ttt.unroll", "ttt.unroll_layers"),
    *("optim.learning_rate", "optim.clip_norm", "optim.eps"),
    *("train.steps", "train.global_batch", "train.log_every", "train.checkpoint_every", "train.keep"),
    *("mesh.model", "mesh.target_utilisation", "eval.batch", "eval.max_new_tokens", "selfmade.*"),
)
NOT_BELOW_ZERO = (
    *("seed", "encoder.layers", "encoder.rate", "adapter.rate", "data.train_limit", "data.validation_limit"),
    *("loss.ce", "loss.kl", "loss.teacher_k", "loss.first", "loss.k", "loss.align", "loss.entropy", "loss.diversity"),
    "loss.chunk",
    *("stages.*.share", "stages.*.reconstruct", "stages.*.continuation", "stages.*.answer", "stages.*.encoder"),
    *("lora.dropout", "dpo.label_smoothing", "dpo.rpo_alpha", "dpo.chunk", "dpo.max_prompt", "dpo.held_out"),
    *("ttt.vocab", "ttt.held_out", "ttt.held_out_length", "ttt.loss_chunk"),
    *("optim.warmup_steps", "optim.weight_decay", "optim.end_fraction", "optim.b1", "optim.b2"),
    *(
        "train.micro_batch",
        "train.eval_every",
        "train.alarm_step",
        "eval.examples",
        "eval.curve_examples",
        "mesh.memory_gb",
    ),
)


WHOLE = 2**31 - 1  # what no whole number may exceed
REAL = 1e15  # nor any other number, on either side of 0
TEXT = 100_000  # characters of a text
LARGEST = {  # what would otherwise be made, or looked through, for hours before anything is said
    **{"data.cards": 10**7, "data.validation_cards": 10**7, "data.facts": 1000},
    **{
        "encoder.slots": 2**16 - 1,
        "encoder.width": 2**16 - 1,
        "lora.rank": 2**16 - 1,
    },  # a message's frame names so many
    **{"encoder.layers": 1000, "selfmade.layers": 1000, "ttt.layers": 1000},
}


def validate(cfg: Config) -> None:
    """Refuses values that are out of range and combinations that cannot work.

    Raises:
      UserError: names the key, its value, the rule and the remedy.
    """
    flat = flatten(to_dict(cfg))
    _check_words(flat)
    _check_ranges(flat)
    _check_sources(cfg)
    if cfg.recipe == "ttt":
        _check_ttt(cfg)
    elif cfg.recipe == "dpo":
        _check_llms(cfg)
        _check_dpo(cfg)
    else:
        _check_llms(cfg)
        _check_wire(cfg)
    if cfg.compute.remat not in ("auto", *REMATS[cfg.recipe]):
        _refuse("compute.remat", cfg.compute.remat, "only a TTT layer knows it; in a decoder 'none' keeps the same.")
    _check_training(cfg)
    _check_mesh(cfg)
    _check_selfmade(cfg)


def _check_wire(cfg: Config) -> None:
    _check_stages(cfg)
    _check_encoder(cfg)
    _check_prompt(cfg)
    _check_data(cfg)
    if cfg.loss.ce + cfg.loss.kl + cfg.loss.first + cfg.loss.k == 0:
        _refuse("loss.ce", 0.0, "kl, first and k are 0 as well: nothing would be learned; give one of them a weight.")


def _refuse(path: str, value: Any, rule: str) -> NoReturn:
    raise UserError(f"config.{path} = {value!r}: {rule}")


def _check_words(flat: dict[str, Any]) -> None:
    for pattern, choices in CHOICES.items():
        for path in fnmatch.filter(flat, pattern):
            words = flat[path] if isinstance(flat[path], tuple) else (flat[path],)
            if not words or len(set(words)) < len(words):
                _refuse(path, flat[path], f"one or more of {', '.join(choices)} is needed, each once.")
            for word in words:
                if word not in choices:
                    _refuse(path, word, f"known are {', '.join(choices)}.{suggest(word, choices)}")


def _check_ranges(flat: dict[str, Any]) -> None:
    for path, value in flat.items():
        for one in value if type(value) is tuple else [value]:
            _check_one(path, one)
    for patterns, lowest in ((ABOVE_ZERO, "it must be above 0."), (NOT_BELOW_ZERO, "it must not be below 0.")):
        for path in (path for pattern in patterns for path in fnmatch.filter(flat, pattern)):
            if flat[path] < 0 or (flat[path] == 0 and patterns is ABOVE_ZERO):
                _refuse(path, flat[path], lowest)
    for path in (path for pattern in CHANNELS for path in fnmatch.filter(flat, pattern)):
        _check_channel(path, flat)
    for path, most in AT_MOST.items():
        if flat[path] > most:
            _refuse(path, flat[path], f"at most {most:,} are made.")
    _check_shares(flat)


def _check_shares(flat: dict[str, Any]) -> None:
    for path in ("optim.b1", "optim.b2"):
        if flat[path] >= 1:
            _refuse(path, flat[path], "a decay must be below 1.")
    if flat["mesh.target_utilisation"] > 1:
        _refuse("mesh.target_utilisation", flat["mesh.target_utilisation"], "it is a share of the memory: up to 1.")
    if flat["optim.end_fraction"] > 1:
        _refuse("optim.end_fraction", flat["optim.end_fraction"], "it is a fraction of the peak: 0 to 1.")


def _check_one(path: str, value: Any) -> None:
    """Refuses what no key may hold: numbers without end or bound, texts that no file can keep."""
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(path, value, "a finite number is needed.")
    if isinstance(value, float) and abs(value) > REAL:
        _refuse(path, value, f"at most {REAL:g}.")
    if isinstance(value, int) and abs(value) > LARGEST.get(path, WHOLE):
        shown = value if abs(value) < 10**40 else f"a number of {value.bit_length()} bits"
        _refuse(path, shown, f"at most {LARGEST.get(path, WHOLE):,}.")
    if isinstance(value, str) and len(value) > TEXT:
        _refuse(path, f"{value[:40]}...", f"{len(value):,} characters, at most {TEXT:,}.")
    if isinstance(value, str) and re.search("[\ud800-\udfff\x00]", value):
        _refuse(path, value, "half a surrogate pair or a zero byte in it; it must be text that a file can keep.")


def _check_channel(path: str, flat: dict[str, Any]) -> None:
    """Refuses what a message cannot have: its slots and width are the first of the encoder's."""
    name, values = path.rsplit(".", 1)[1], flat[path]
    for value in values:
        if name == "bits" and value not in BITS:
            _refuse(path, values, f"a value takes {', '.join(map(str, BITS))} bits.")
        bound = "encoder.slots" if name == "slots" else "encoder.width"
        if name != "bits" and not 1 <= value <= flat[bound]:
            _refuse(path, values, f"each must be from 1 to {bound} = {flat[bound]}.")
    if len(set(values)) < len(values):
        _refuse(path, values, "each at most once.")


def _check_stages(cfg: Config) -> None:
    stages = {"align": cfg.stages.align, "pretrain": cfg.stages.pretrain, "answer": cfg.stages.answer}
    if not any(stage.share for stage in stages.values()):
        _refuse("stages.answer.share", 0.0, "every stage's share is 0: nothing would be trained; give one a share.")
    for name, stage in stages.items():
        if not stage.share:
            continue
        if not stage.reconstruct + stage.continuation + stage.answer:
            rule = "the stage has no task: give reconstruct, continuation or answer a weight."
            _refuse(f"stages.{name}.answer", 0.0, rule)
        if stage.reconstruct + stage.continuation and (not stage.lengths or min(stage.lengths) < 2):
            _refuse(f"stages.{name}.lengths", stage.lengths, "passages of two tokens or more are needed.")


def _check_llms(cfg: Config) -> None:
    if not cfg.llms:
        _refuse("llms", {}, "no reader is named; add one: c.llms.llama = base.llm(SOURCE), as in configs/default.py.")
    for name, llm in cfg.llms.items():
        path = f"llms.{name}"
        if not re.fullmatch("[a-z][a-z0-9_]*", name):
            _refuse("llms", name, "a reader's name is lower-case letters, digits and _, beginning with a letter.")
        if not llm.source:
            _refuse(f"{path}.source", "", "name a folder, a .gguf file, a hub id, pypi:... or selfmade:...")
        kind, _, rest = llm.source.partition(":")
        if kind == "selfmade" and rest not in SELFMADE:
            _refuse(f"{path}.source", llm.source, f"known are {', '.join('selfmade:' + word for word in SELFMADE)}.")
        _check_hash(f"{path}.sha256", llm.sha256)
    if cfg.prompt.system and all(llm.template == "plain" for llm in cfg.llms.values()):
        _refuse("prompt.system", cfg.prompt.system, "only chat templates hold it; set a reader's template to 'chat'.")


def _check_hash(path: str, value: str) -> None:
    if value and not re.fullmatch("[0-9a-f]{64}", value):
        _refuse(path, value, "64 lower-case hex digits are needed, or nothing.")


def _check_encoder(cfg: Config) -> None:
    encoder = cfg.encoder
    if encoder.kind != "bytes" and not encoder.source:
        rule = f"encoder.kind {encoder.kind!r} reads a pretrained body: name it, or choose kind 'bytes'."
        _refuse("encoder.source", "", rule)
    if encoder.kind == "bytes" and (encoder.source or encoder.sha256):
        _refuse(
            "encoder.source", encoder.source or encoder.sha256, "encoder.kind 'bytes' loads nothing: leave it empty."
        )
    _check_hash("encoder.sha256", encoder.sha256)
    if cfg.adapter.start == "aligned" and (encoder.kind, encoder.pooling) != ("lm", "windows"):
        rule = "it needs the embedding table of encoder.kind 'lm' and encoder.pooling 'windows'; choose 'random'."
        _refuse("adapter.start", "aligned", rule)
    if encoder.width > WIDEST:
        _refuse("encoder.width", encoder.width, f"a message's slot has at most {WIDEST} values; lower it.")
    if encoder.slots * encoder.width > MOST_VALUES:
        rule = (
            f"with encoder.width = {encoder.width} a message has more than {MOST_VALUES} values; lower one of the two."
        )
        _refuse("encoder.slots", encoder.slots, rule)
    if encoder.slots > encoder.window:
        rule = f"more slots than encoder.window = {encoder.window} has places; lower slots or widen the window."
        _refuse("encoder.slots", encoder.slots, rule)


def _check_prompt(cfg: Config) -> None:
    user = cfg.prompt.user
    remedy = "it needs {context} once and then {question} once, plain, and no other braces (write {{ for a brace)."
    try:
        parts = split_prompt(user)
    except ValueError as error:
        raise UserError(f"config.prompt.user = {user!r}: {error}; {remedy}") from error
    if parts is None:
        _refuse("prompt.user", user, remedy)


def _check_sources(cfg: Config) -> None:
    data = cfg.data
    for path, source in (("data.train", data.train), ("data.validation", data.validation)):
        if not source and (path == "data.train" or cfg.recipe == "latentwire"):
            _refuse(path, "", "name 'cards', a .json or .jsonl file, or hub:NAME.")
    if data.train == data.validation and data.train not in MADE and not data.train.startswith("hub:"):
        _refuse("data.validation", data.validation, "it is the training file; validate on another one.")


def _check_dpo(cfg: Config) -> None:
    dpo = cfg.dpo
    if len(cfg.llms) != 1:
        _refuse("llms", list(cfg.llms), "preferences tune one model; name exactly one.")
    if len(dpo.weights) != len(dpo.loss):
        _refuse("dpo.weights", dpo.weights, f"a weight for each of dpo.loss = {dpo.loss} is needed.")
    if not sum(map(abs, dpo.weights)) + dpo.rpo_alpha:
        _refuse("dpo.weights", dpo.weights, "all are 0: nothing would be learned.")
    if dpo.label_smoothing and not set(SMOOTHED) & set(dpo.loss):
        _refuse("dpo.label_smoothing", dpo.label_smoothing, f"only {' and '.join(SMOOTHED)} know it; set it to 0.")
    if dpo.label_smoothing >= 0.5:
        _refuse("dpo.label_smoothing", dpo.label_smoothing, "half of all labels flipped say nothing: below 0.5.")
    if cfg.prompt.system:
        _refuse("prompt.system", cfg.prompt.system, "the rows hold the whole prompt; leave it empty.")
    for path, value in (("lora.dropout", cfg.lora.dropout), ("dpo.held_out", dpo.held_out)):
        if value >= 1:
            _refuse(path, value, "it is a share: below 1.")
    _check_preferences(cfg)


def _check_ttt(cfg: Config) -> None:
    spec = cfg.ttt
    if cfg.llms:
        _refuse("llms", list(cfg.llms), "recipe 'ttt' trains a model of its own (the keys of ttt.*): name no reader.")
    if spec.width % (2 * spec.heads):
        _refuse("ttt.width", spec.width, f"heads need an even width: a multiple of 2 x ttt.heads = {2 * spec.heads}.")
    if spec.segments > 1 and spec.length % spec.chunk:
        rule = f"fast weights pass on from whole chunks: a multiple of ttt.chunk = {spec.chunk}."
        _refuse("ttt.length", spec.length, rule)
    if spec.segments > 1 and spec.form == "full":
        _refuse("ttt.form", "full", "it makes no fast weights that could pass on (ttt.segments > 1); use 'scan'.")
    if cfg.mesh.placement not in TTT_PLACEMENTS:
        rule = f"one model that learns lies on one mesh: {', '.join(TTT_PLACEMENTS)}."
        _refuse("mesh.placement", cfg.mesh.placement, rule)
    _check_text(cfg)


def _check_text(cfg: Config) -> None:
    """Refuses what a text to learn from cannot be."""
    spec, data = cfg.ttt, cfg.data
    if spec.held_out >= 1:
        _refuse("ttt.held_out", spec.held_out, "it is a share: below 1.")
    if not spec.held_out and not data.validation:
        _refuse("ttt.held_out", 0.0, "nothing is held out; give a share, or a source as data.validation.")
    if data.train == data.validation:  # of a hub's data set too: both would be its split "train"
        _refuse("data.validation", data.validation, "it is the training text; leave it empty, or name another one.")
    if spec.tokenizer == "bytes" and spec.vocab not in (0, BYTES):
        _refuse("ttt.vocab", spec.vocab, f"the tokenizer 'bytes' has {BYTES} tokens; leave it 0.")
    for path, limit in (("data.train_limit", data.train_limit), ("data.validation_limit", data.validation_limit)):
        if limit:
            _refuse(path, limit, "a text has no examples to count; leave it 0 (eval.examples limits windows).")
    for path, source in (("data.train", data.train), ("data.validation", data.validation)):
        if source in MADE:
            _refuse(path, source, "recipe 'ttt' reads texts: 'docstrings', a file or folder, or hub:NAME[:CONFIG].")


def _check_preferences(cfg: Config) -> None:
    data = cfg.data
    if not cfg.dpo.held_out and not data.validation:
        _refuse("dpo.held_out", 0.0, "nothing is held out; give a share, or a file as data.validation.")
    for path, source in (("data.train", data.train), ("data.validation", data.validation)):
        if source in MADE or source.startswith("hub:"):
            _refuse(path, source, 'preferences are rows {"prompt", "chosen", "rejected"}: name a .json or .jsonl file.')
    for name, llm in cfg.llms.items():
        if llm.source.startswith("selfmade:"):
            _refuse(f"llms.{name}.source", llm.source, "self-made readers read cards; name a pretrained model.")


def _check_data(cfg: Config) -> None:
    data = cfg.data
    if data.answer_tokens < 2:
        _refuse("data.answer_tokens", data.answer_tokens, "one answer token and EOS need 2.")
    if data.question_tokens >= data.context_tokens:
        rule = f"the question is part of the text prompt: it must be below data.context_tokens = {data.context_tokens}."
        _refuse("data.question_tokens", data.question_tokens, rule)


def _check_training(cfg: Config) -> None:
    train = cfg.train
    if train.micro_batch and train.global_batch % train.micro_batch:
        rule = f"it must divide train.global_batch = {train.global_batch}; 0 takes a device's whole share."
        _refuse("train.micro_batch", train.micro_batch, rule)


def _check_mesh(cfg: Config) -> None:
    mesh = cfg.mesh
    if mesh.data != -1 and mesh.data < 1:
        _refuse("mesh.data", mesh.data, "it must be above 0, or -1 for all devices that remain.")
    if mesh.placement == "tensor" and mesh.model == 1:
        _refuse(
            "mesh.placement", "tensor", "it splits readers over mesh.model, which is 1; set mesh.model to 2 or more."
        )
    if mesh.placement not in ("tensor", "split") and mesh.model > 1:
        rule = f"placement {mesh.placement!r} leaves that axis idle; use 'tensor', 'split' or model 1."
        _refuse("mesh.model", mesh.model, rule)
    if mesh.placement in ("auto", "single", "hybrid3", "hybrid4") and mesh.data != -1:
        rule = f"placement {mesh.placement!r} decides it itself; leave it -1, or name another placement."
        _refuse("mesh.data", mesh.data, rule)
    if mesh.placement == "fsdp" and mesh.data == 1:
        _refuse(
            "mesh.placement", "fsdp", "it splits readers over mesh.data, which is 1; use 'replicate' or more devices."
        )
    share = max(mesh.data, 1) * max(cfg.train.micro_batch, 1)
    if cfg.train.global_batch % share:
        rule = f"it must be a multiple of mesh.data x train.micro_batch = {share}."
        _refuse("train.global_batch", cfg.train.global_batch, rule)


def _check_selfmade(cfg: Config) -> None:
    sizes = cfg.selfmade
    if sizes.heads % sizes.kv_heads:
        _refuse("selfmade.kv_heads", sizes.kv_heads, f"it must divide selfmade.heads = {sizes.heads}.")
    if sizes.width % (2 * sizes.heads):
        rule = f"heads need an even width: a multiple of 2 x selfmade.heads = {2 * sizes.heads}."
        _refuse("selfmade.width", sizes.width, rule)
