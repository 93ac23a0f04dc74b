"""Rules across keys of a configuration, checked once, before a device starts.

The type, range and choices of a single key are declared with it (`config_sections`). Every refusal names the key, its
value, the rule and, where the rule does not say it, the remedy.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping

from lw_jax.core.config import REMATS, Config, flags, flatten, split_prompt, unread
from lw_jax.core.config_keys import refuse, suggest
from lw_jax.core.config_sections import BITS, FIELDS, MEANING, MODEL_AXIS, OWN_DATA, PRETRAINED
from lw_jax.core.errors import UserError
from lw_jax.core.eval_rows import OF_CACHE, RATIOS

SMOOTHED = ("sigmoid", "robust")  # terms of dpo.loss that know label smoothing
MOST_VALUES = 2**24  # of a message: 64 MiB as fp32
MADE = ("cards", "profiles", "pairs")  # data that the project makes; its splits share nothing
DOCSTRINGS = "docstrings"  # text that is on every machine
FILES = (".json", ".jsonl", ".txt", ".gz", ".parquet", ".arrow")
SELFMADE = ("llama", "qwen")
BYTES = 257  # UTF-8 and the end of a document
TILE = 16  # smallest side of a product's tile in `models/ttt_kernel.py`
TTT_PLACEMENTS = ("auto", "single", "replicate", "fsdp")


def check_processes(cfg: Config, processes: int) -> None:
    """Refuses what one process alone can do, where there are several: one a node."""
    if processes == 1:
        return
    if cfg.encoder.kind == "cache":
        refuse(
            "encoder.kind", "cache", f"is computed by one process, and this run has {processes}: start it on one node."
        )
    nodes = f"this run has one process for each of its {processes} nodes"
    rule = f"is read from a cache that one process fills, and {nodes}"
    match caching_key(cfg):
        case "loss.teacher_k" as path:
            refuse(path, cfg.loss.teacher_k, f"{rule}; 0 runs the teacher in every step.")
        case "dpo.reference" as path:
            refuse(path, cfg.dpo.reference, f"{rule}; 'recomputed' computes it in every step.")


def caching_key(cfg: Config) -> str:
    """Returns the key that asks for a frozen model's outputs of all examples before the first step; else nothing."""
    if cfg.recipe == "latentwire" and cfg.loss.kl and cfg.loss.teacher_k:
        return "loss.teacher_k"
    return "dpo.reference" if cfg.recipe == "dpo" and cfg.dpo.reference == "cached" else ""


def validate(cfg: Config) -> None:
    """Refuses combinations of values that cannot work; `config.build` has refused single values."""
    _check_sources(cfg)
    _check_columns(cfg)
    _check_llms(cfg)
    _check_unread(cfg)
    {"latentwire": _check_wire, "dpo": _check_dpo, "ttt": _check_ttt}[cfg.recipe](cfg)
    if cfg.compute.remat not in ("auto", *REMATS[cfg.recipe]):
        rule = f"recipe {cfg.recipe!r} knows {', '.join(('auto', *REMATS[cfg.recipe]))}; in a decoder none equals dots."
        refuse("compute.remat", cfg.compute.remat, rule)
    _check_training(cfg)
    _check_mesh(cfg)


def _check_unread(cfg: Config) -> None:
    """Refuses values that would have no effect."""
    values, defaults = flatten(dataclasses.asdict(cfg)), unread(cfg)
    if changed := [path for path, default in defaults.items() if values[path] != default]:
        kind = f"encoder.kind {cfg.encoder.kind!r}" if cfg.recipe == "latentwire" else f"recipe {cfg.recipe!r}"
        # A break of lines, as prompts have, does not pass through a message.
        plain = {path: defaults[path] for path in changed if "\n" not in str(defaults[path])}
        remedy = f", or give the default: {shlex.join(flags(plain))}" if plain else ""
        refuse(changed[0], values[changed[0]], f"{kind} does not read it; leave it out{remedy}")


def _check_wire(cfg: Config) -> None:
    _check_stages(cfg)
    _check_encoder(cfg)
    _check_cache(cfg)
    if "selected_taught" in cfg.eval.rows and cfg.encoder.kind != "lm":
        rule = (
            f"selected words need encoder.kind 'lm', which finds the words (it is {cfg.encoder.kind!r}); leave it out."
        )
        refuse("eval.rows", cfg.eval.rows, rule)
    _check_prompt(cfg)
    if cfg.data.question_tokens >= cfg.data.context_tokens:
        rule = f"must be below data.context_tokens = {cfg.data.context_tokens}: the question is part of the prompt."
        refuse("data.question_tokens", cfg.data.question_tokens, rule)
    packed, data = cfg.data.packed_tokens, cfg.data
    longest = max(data.question_tokens + data.answer_tokens - 1, 2 * data.answer_tokens)
    if 0 < packed < longest:
        rule = f"must be 0 or at least {longest}, for the longest question with its answer."
        refuse("data.packed_tokens", packed, rule)
    if not cfg.loss.ce and not cfg.loss.kl:
        refuse("loss.ce", 0.0, "must be above 0 where loss.kl is 0: nothing would be learned.")


def _check_stages(cfg: Config) -> None:
    align, pretrain, answer = cfg.stages.align, cfg.stages.pretrain, cfg.stages.answer
    if align.share + pretrain.share > 1.0 + 1e-9:
        rule = f"must be at most 1 - stages.align.share = {1.0 - align.share:g}."
        refuse("stages.pretrain.share", pretrain.share, rule)
    if cfg.data.passages and not align.share and not pretrain.share:
        rule = "must be empty: no stage has passages (stages.align.share and stages.pretrain.share are 0)."
        refuse("data.passages", cfg.data.passages, rule)
    if pretrain.share and not pretrain.lengths:
        refuse("stages.pretrain.lengths", (), "must name a length: the stage has a share of the run.")
    sizes = (("slots", answer.slots, cfg.encoder.slots), ("widths", answer.widths, cfg.encoder.width))
    for name, values, bound in sizes:
        if not all(1 <= value <= bound for value in values):
            most = {"slots": "encoder.slots", "widths": "encoder.width"}[name]
            refuse(f"stages.answer.{name}", values, f"must be from 1 to {most} = {bound}.")
    if not set(answer.bits) <= set(BITS):
        refuse("stages.answer.bits", answer.bits, f"must be some of {', '.join(map(str, BITS))}.")
    if answer.slots and answer.ratios:
        rule = f"must be empty where stages.answer.slots is given ({answer.slots}): either decides a message's slots."
        refuse("stages.answer.ratios", answer.ratios, rule)
    for name in ("slots", "ratios", "widths", "bits"):
        values = getattr(answer, name)
        if len(set(values)) < len(values):
            refuse(f"stages.answer.{name}", values, "must name each size once.")


def _check_llms(cfg: Config) -> None:
    if cfg.recipe == "ttt":
        if cfg.llms:
            refuse("llms", list(cfg.llms), "must be empty: recipe 'ttt' trains a model of its own (ttt.*).")
        return
    if not cfg.llms:
        refuse("llms", {}, "must name a reader, as in configs/default.py: c.llms.llama = base.llm(SOURCE).")
    for name, llm in cfg.llms.items():
        path = f"llms.{name}"
        if not re.fullmatch("[a-z][a-z0-9_]*", name):
            refuse("llms", name, "must be lower-case letters, digits and _, a letter first.")
        if not llm.source:
            refuse(f"{path}.source", "", "must name a folder, a .gguf file, a hub id, pypi:... or selfmade:...")
        kind, _, architecture = llm.source.partition(":")
        if kind == "selfmade" and architecture not in SELFMADE:
            known = ", ".join(f"selfmade:{choice}" for choice in SELFMADE)
            refuse(f"{path}.source", llm.source, f"must be one of {known}.")
        _check_hash(f"{path}.sha256", llm.sha256)
    if cfg.prompt.system and all(llm.template == "plain" for llm in cfg.llms.values()):
        refuse("prompt.system", cfg.prompt.system, "must be empty, or the template of a reader 'chat'.")


def _check_hash(path: str, value: str) -> None:
    if value and not re.fullmatch("[0-9a-f]{64}", value):
        refuse(path, value, "must be 64 lower-case hex digits, or empty.")


def _check_encoder(cfg: Config) -> None:
    encoder = cfg.encoder
    if encoder.kind in PRETRAINED and not encoder.source:
        refuse("encoder.source", "", f"must name a body for encoder.kind {encoder.kind!r}; kind 'bytes' needs none.")
    _check_hash("encoder.sha256", encoder.sha256)
    if cfg.adapter.start == "aligned" and (encoder.kind != "lm" or encoder.pooling == "queries"):
        rule = "needs encoder.kind 'lm' (an embedding table) and encoder.pooling 'windows' or 'rare'; set 'random'."
        refuse("adapter.start", "aligned", rule)
    if encoder.states and (encoder.pooling != "rare" or cfg.adapter.kind != "kv"):
        rule = "needs encoder.pooling 'rare' and adapter.kind 'kv'; set 0."
        refuse("encoder.states", encoder.states, rule)
    if encoder.slots * encoder.width > MOST_VALUES:
        rule = f"must be at most {MOST_VALUES:,} / encoder.width = {MOST_VALUES // encoder.width}."
        refuse("encoder.slots", encoder.slots, rule)
    if encoder.slots > encoder.window:
        refuse("encoder.slots", encoder.slots, f"must be at most encoder.window = {encoder.window}.")


def _check_cache(cfg: Config) -> None:
    encoder = cfg.encoder
    if encoder.kind != "cache":
        if rows := [row for row in cfg.eval.rows if row in OF_CACHE]:
            refuse("eval.rows", cfg.eval.rows, f"must not name {', '.join(rows)}: they need encoder.kind 'cache'.")
        return
    if not 1 <= encoder.ratio <= RATIOS:
        refuse("encoder.ratio", encoder.ratio, f"must be from 1 to {RATIOS} for encoder.kind 'cache'.")
    if not cfg.train.steps:
        return
    stages, rule = cfg.stages, "for encoder.kind 'cache'"
    if stages.pretrain.share and stages.pretrain.reconstruct != 1:
        why = "a reader is asked to repeat a text, and cannot continue it behind other words"
        refuse("stages.pretrain.reconstruct", stages.pretrain.reconstruct, f"must be 1 {rule}: {why}.")
    if beyond := [ratio for ratio in stages.answer.ratios if ratio > RATIOS]:
        refuse("stages.answer.ratios", beyond[0], f"must be at most {RATIOS} {rule}.")


def _check_prompt(cfg: Config) -> None:
    user = cfg.prompt.user
    rule = "must have {context} once and then {question} once, plain, and no other braces ({{ is a brace)."
    try:
        parts = split_prompt(user)
    except ValueError as error:
        raise UserError(f"config.prompt.user = {user!r}: {error}; {rule}") from error
    if parts is None:
        refuse("prompt.user", user, rule)


def _sources(cfg: Config) -> Mapping[str, str]:
    return {"data.train": cfg.data.train, "data.validation": cfg.data.validation}


def _check_sources(cfg: Config) -> None:
    data = cfg.data
    for path, source in _sources(cfg).items():
        if not source and (path == "data.train" or cfg.recipe == "latentwire"):
            refuse(path, "", "must name 'cards', a file or folder of rows, or hub:NAME.")
    # Folders and data sets of the hub have splits.
    if data.train == data.validation and (data.train == DOCSTRINGS or data.train.endswith(FILES)):
        refuse("data.validation", data.validation, "must not be the training file; name another one.")


def _check_columns(cfg: Config) -> None:
    columns, known = cfg.data.columns, FIELDS[cfg.recipe]
    for spec in columns:
        field, colon, column = spec.partition(":")
        if not colon or field not in (known if column else (*known, *MEANING)):
            rule = f"must be FIELD:COLUMN, FIELD one of {', '.join(known)}.{suggest(field, known)}"
            refuse("data.columns", spec, rule)
    fields = [spec.partition(":")[0] for spec in columns]
    if len(set(fields)) < len(fields):
        refuse("data.columns", columns, "must name each field once.")
    sources = [*_sources(cfg).values(), cfg.data.passages]
    if columns and all(source in ("", *MADE, DOCSTRINGS) for source in sources):
        refuse("data.columns", columns, "must be empty: no source has columns (data.train, validation, passages).")


def _check_held_out(cfg: Config) -> None:
    if not cfg.data.held_out and not cfg.data.validation:
        refuse("data.held_out", 0.0, "must be above 0, or data.validation name a source: nothing is held out.")


def _check_dpo(cfg: Config) -> None:
    dpo = cfg.dpo
    if len(cfg.llms) != 1:
        refuse("llms", list(cfg.llms), "must be exactly one: preferences tune one model.")
    if not cfg.lora.targets:
        refuse("lora.targets", cfg.lora.targets, "must name one or more modules, such as q_proj.")
    if len(dpo.weights) != len(dpo.loss):
        refuse("dpo.weights", dpo.weights, f"must have a weight for each of dpo.loss = {dpo.loss}.")
    if not any(dpo.weights):
        refuse("dpo.weights", dpo.weights, "must not all be 0: nothing would be learned.")
    if dpo.label_smoothing and not set(SMOOTHED) & set(dpo.loss):
        rule = f"must be 0: only {' and '.join(SMOOTHED)} of dpo.loss know it."
        refuse("dpo.label_smoothing", dpo.label_smoothing, rule)
    _check_held_out(cfg)
    for path, source in _sources(cfg).items():
        if source in MADE:
            refuse(path, source, 'must be a file, a folder or hub:NAME of rows {"prompt", "chosen", "rejected"}.')
    for name, llm in cfg.llms.items():
        if llm.source.startswith("selfmade:"):
            refuse(f"llms.{name}.source", llm.source, "must be a pretrained model: self-made readers read cards.")


def _check_ttt(cfg: Config) -> None:
    spec = cfg.ttt
    if spec.width % (2 * spec.heads):
        rule = f"must be a multiple of 2 x ttt.heads = {2 * spec.heads}: heads have an even size."
        refuse("ttt.width", spec.width, rule)
    if spec.segments > 1 and spec.length % spec.chunk:
        rule = f"must be a multiple of ttt.chunk = {spec.chunk}: segments pass fast weights on after whole chunks."
        refuse("ttt.length", spec.length, rule)
    if spec.segments > 1 and spec.form == "kernel":
        refuse("ttt.form", spec.form, "must be 'scan' where ttt.segments > 1: it makes no fast weights to pass on.")
    sides = (spec.chunk, spec.width // spec.heads)
    if spec.form == "kernel" and (spec.inner != "linear" or any(n < TILE or n & (n - 1) for n in sides)):
        rule = f"needs ttt.inner='linear', and powers of two from {TILE} on as ttt.chunk and ttt.width / ttt.heads."
        refuse("ttt.form", spec.form, rule)
    if cfg.mesh.placement not in TTT_PLACEMENTS:
        rule = f"must be one of {', '.join(TTT_PLACEMENTS)}: recipe 'ttt' has one model on one mesh."
        refuse("mesh.placement", cfg.mesh.placement, rule)
    _check_text(cfg)


def _check_text(cfg: Config) -> None:
    spec = cfg.ttt
    _check_held_out(cfg)
    if spec.tokenizer == "bytes" and spec.vocab not in (0, BYTES):
        refuse("ttt.vocab", spec.vocab, f"must be 0: the tokenizer 'bytes' has {BYTES} tokens.")
    for path, source in _sources(cfg).items():
        if source in MADE:
            refuse(path, source, "must be 'docstrings', a file or folder of text, or hub:NAME.")


def _check_training(cfg: Config) -> None:
    train = cfg.train
    if not train.steps and (cfg.recipe != "latentwire" or cfg.encoder.kind != "cache"):
        refuse("train.steps", 0, "must be above 0: only encoder.kind 'cache' is whole without a step.")
    if train.micro_batch > train.global_batch:
        rule = f"must be at most train.global_batch = {train.global_batch}; 0 takes a device's whole share."
        refuse("train.micro_batch", train.micro_batch, rule)


def _check_mesh(cfg: Config) -> None:
    mesh = cfg.mesh
    if not mesh.data:
        refuse("mesh.data", 0, "must be above 0, or -1 for all devices that remain.")
    if mesh.placement == "tensor" and mesh.model == 1:
        refuse("mesh.placement", "tensor", "needs mesh.model of 2 or more to split readers over; it is 1.")
    if mesh.placement not in MODEL_AXIS and mesh.model > 1:
        rule = f"must be 1 for placement {mesh.placement!r}; 'tensor' and 'split' use the axis."
        refuse("mesh.model", mesh.model, rule)
    if mesh.placement in ("auto", *OWN_DATA) and mesh.data != -1:
        refuse("mesh.data", mesh.data, f"must be -1 for placement {mesh.placement!r}, which decides it itself.")
    if mesh.placement == "fsdp" and mesh.data == 1:
        refuse("mesh.placement", "fsdp", "needs mesh.data of 2 or more to split readers over; 'replicate' takes 1.")
    if cfg.train.global_batch < mesh.data:
        rule = f"must be at least mesh.data = {mesh.data}: each device of the data axis takes an example."
        refuse("train.global_batch", cfg.train.global_batch, rule)
