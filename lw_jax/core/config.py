"""ConfigDict at the door, frozen dataclasses inside.

The field names equal the keys of `configs/base.py`, where each key's default, unit and reason stand; what their values
may be stands in `lw_jax/core/validation.py`.
"""

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import re
import string
import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol

from lw_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class LLM:
    """One frozen reader."""

    source: str
    sha256: str
    weights: str
    template: str


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What writes a text into latents."""

    kind: str
    source: str
    sha256: str
    run: str
    layers: int
    slots: int
    width: int
    window: int
    windows: int
    pooling: str
    rate: float


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What turns latents into a reader's soft prefix."""

    hidden: int
    start: str
    calibration: str
    rate: float


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The words around text and question."""

    user: str
    system: str
    anchor: str
    question: str


def split_prompt(user: str) -> tuple[str, str, str] | None:
    """Returns the words before the context, between it and the question, and after that; {{ and }} are braces.

    None where the fields are others than {context} and then {question}, plain. Raises ValueError for single braces.
    """
    texts, fields = [""], []
    for text, field, spec, conversion in string.Formatter().parse(user):
        texts[-1] += text
        if field is not None:
            fields.append((field, spec, conversion))
            texts.append("")
    if fields != [("context", "", None), ("question", "", None)]:
        return None
    before, middle, after = texts
    return before, middle, after


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples and the lengths they are held to."""

    train: str
    validation: str
    passages: str
    train_limit: int
    validation_limit: int
    cards: int
    validation_cards: int
    facts: int
    context_tokens: int
    question_tokens: int
    answer_tokens: int
    overlong: str


@dataclasses.dataclass(frozen=True)
class Loss:
    """Weights of the objective's terms."""

    ce: float
    kl: float
    temperature: float
    teacher_k: int
    first: float
    k: float
    k_tokens: int
    align: float
    entropy: float
    diversity: float
    chunk: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stretch of a run: what is learned, how fast, and how the latents are sent."""

    share: float
    reconstruct: float
    continuation: float
    answer: float
    lengths: tuple[int, ...]
    rate: float
    encoder: float
    slots: tuple[int, ...]
    widths: tuple[int, ...]
    bits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stretches of a run, in this order."""

    align: Stage
    pretrain: Stage
    answer: Stage


@dataclasses.dataclass(frozen=True)
class Lora:
    """Pairs of small matrices beside a frozen model's own."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DPO:
    """Preference pairs: what is minimised over them, and how long they may be."""

    loss: tuple[str, ...]
    weights: tuple[float, ...]
    beta: float
    label_smoothing: float
    rpo_alpha: float
    reference: str
    chunk: int
    max_length: int
    max_prompt: int
    truncation: str
    held_out: float
    buckets: int


@dataclasses.dataclass(frozen=True)
class TTT:
    """A Test-Time-Training language model and the text it learns from."""

    inner: str
    backbone: str
    layers: int
    width: int
    heads: int
    ffn: int
    chunk: int
    inner_rate: float
    inner_start: float
    source: str
    tokenizer: str
    vocab: int
    table_multiple: int
    length: int
    segments: int
    held_out: float
    held_out_length: int
    form: str
    unroll: int
    unroll_layers: int
    loss_chunk: int


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW or Muon, and the schedule."""

    kind: str
    learning_rate: float
    warmup_steps: int
    end_fraction: float
    weight_decay: float
    decays: str
    clip_norm: float
    b1: float
    b2: float
    eps: float


@dataclasses.dataclass(frozen=True)
class Train:
    """How long, how much at once, how often told and saved."""

    steps: int
    global_batch: int
    micro_batch: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    alarm_step: int
    alarm_gap: float
    alarm: str
    keep: int


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Where the frozen readers lie."""

    placement: str
    data: int
    model: int
    target_utilisation: float
    memory_gb: float


@dataclasses.dataclass(frozen=True)
class Compute:
    """Arithmetic and recomputation."""

    dtype: str
    remat: str


@dataclasses.dataclass(frozen=True)
class Eval:
    """What is measured after training."""

    examples: int
    batch: int
    max_new_tokens: int
    layers: str
    rows: tuple[str, ...]
    resamples: int
    curve: str
    curve_examples: int
    slots: tuple[int, ...]
    widths: tuple[int, ...]
    bits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Selfmade:
    """Sizes of the tiny readers that the project trains itself."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    steps: int
    batch: int
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run is told."""

    recipe: str
    seed: int
    llms: dict[str, LLM]
    encoder: Encoder
    adapter: Adapter
    prompt: Prompt
    data: Data
    loss: Loss
    stages: Stages
    lora: Lora
    dpo: DPO
    ttt: TTT
    optim: Optim
    train: Train
    mesh: Mesh
    compute: Compute
    eval: Eval
    selfmade: Selfmade


# What decides how fast and where a run computes, how often it reports and what is asked of it afterwards, but not
# what it learns. Everything else makes two runs different runs.
_NOT_MEANING = re.compile(
    r"train\.(log_every|eval_every|checkpoint_every|keep|micro_batch|alarm.*)|mesh\..*|compute\.remat|eval\..*"
    r"|loss\.chunk|dpo\.chunk|ttt\.(form|unroll|unroll_layers|loss_chunk|held_out_length)"
)

# recipe -> the words of compute.remat that it knows beside "auto", what keeps most first
REMATS = {"latentwire": ("none", "full"), "dpo": ("none", "full"), "ttt": ("none", "dots", "full")}

# What the planner searches: a file's own choice of them is one answer for one machine.
SEARCHED = ("mesh.placement", "mesh.data", "mesh.model", "compute.remat", "train.micro_batch")


class Values(Protocol):
    """Named values, nested: a dict or a ConfigDict, which is no Mapping."""

    def items(self) -> Any:
        """Returns (name, value) pairs."""
        ...


def build(values: Values) -> Config:
    """Returns the frozen configuration of a ConfigDict or a plain dict.

    Raises:
      UserError: a key is unknown or missing, or its value has another type than `configs/base.py` gives it.
    """
    return _build(Config, values, "config")


def complete(saved: Mapping[str, Any], defaults: Values, path: str = "") -> dict[str, Any]:
    """Returns what was saved by earlier code as `build` takes it, where only keys differ that decide no meaning.

    Those that it lacks get their defaults, those that are known no more are left out; what decides a run's meaning
    stays as it is, for `build` to refuse.
    """
    known, found = dict(defaults.items()), dict(saved)
    for key in found.keys() | known.keys():
        here = f"{path}.{key}".lstrip(".")
        if hasattr(known.get(key), "items") and isinstance(found.get(key, {}), Mapping):
            found[key] = complete(found.get(key, {}), known[key], here)
        elif key not in found and _NOT_MEANING.fullmatch(here):
            found[key] = known[key]
        elif key not in known and _NOT_MEANING.fullmatch(here):
            del found[key]
    return found


def to_dict(cfg: Config) -> dict[str, Any]:
    """Returns nested plain dicts that `json` can write and `build` can read."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def flatten(values: Values, prefix: str = "") -> dict[str, Any]:
    """Returns one entry a value, by its dotted path; lists become tuples."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if hasattr(value, "items"):  # a ConfigDict is no Mapping
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = tuple(value) if isinstance(value, list) else value
    return flat


def diff(old: Values, new: Values) -> list[str]:
    """Returns one line for each value in which two configurations (nested or flat dicts) differ."""
    a, b = flatten(old), flatten(new)
    return [
        f"{path}: {_shown(a, path)} -> {_shown(b, path)}"
        for path in sorted(a.keys() | b.keys())
        if _shown(a, path) != _shown(b, path)
    ]


def meaning(cfg: Config) -> dict[str, Any]:
    """Returns, by path, the values that decide what a run learns: the same on every machine and mesh."""
    return {path: value for path, value in flatten(to_dict(cfg)).items() if not _NOT_MEANING.fullmatch(path)}


def digest(values: Config | Values) -> str:
    """Returns 16 hex digits that are equal for equal values, in any process and on any Python."""
    plain = flatten(to_dict(values) if isinstance(values, Config) else values)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def stages(cfg: Config) -> list[tuple[str, Stage, int]]:
    """Returns (name, stage, optimizer steps) of each stage that has a share of the run, in their order.

    The steps are rounded so that they add up to train.steps; a stage too small for a step is left out.
    """
    named = [(field.name, getattr(cfg.stages, field.name)) for field in dataclasses.fields(Stages)]
    total, ends = sum(stage.share for _, stage in named), [0]
    for _, stage in named:
        ends.append(ends[-1] + stage.share / total * cfg.train.steps)
    steps = [round(end) - round(start) for start, end in itertools.pairwise(ends)]
    return [(name, stage, count) for (name, stage), count in zip(named, steps, strict=True) if count]


def suggest(name: str, known: typing.Iterable[str]) -> str:
    """Returns ' Did you mean ...?' for the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _shown(flat: Mapping[str, Any], path: str) -> str:
    return repr(flat[path]) if path in flat else "(absent)"


def _build(cls: type, values: Any, path: str) -> Any:
    if not hasattr(values, "items"):
        raise UserError(f"{path} = {values!r}: a section of keys is needed, as in configs/base.py.")
    hints = typing.get_type_hints(cls)
    given = dict(values.items())
    for key in given:
        if key not in hints:
            raise UserError(f"{path}.{key} is no known key.{suggest(key, hints)} configs/base.py lists them all.")
    if missing := [key for key in hints if key not in given]:
        raise UserError(f"{path}.{missing[0]} is missing; start from configs/base.py, which gives every key a value.")
    return cls(**{key: _convert(hint, given[key], f"{path}.{key}") for key, hint in hints.items()})


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path)
    if typing.get_origin(hint) is dict:
        if not hasattr(value, "items"):
            raise UserError(f"{path} = {_repr(value)}: named entries are needed, as in configs/default.py.")
        element = typing.get_args(hint)[1]
        return {str(name): _build(element, entry, f"{path}.{name}") for name, entry in value.items()}
    if isinstance(hint, types.GenericAlias):
        element, _ = typing.get_args(hint)
        if isinstance(value, list | tuple):
            if any(type(item) is int and abs(item) >= _WHOLE for item in value):
                raise UserError(f"{path} = {_repr(value)}: numbers below 2^63 are needed.")
            value = tuple(float(item) if element is float and type(item) is int else item for item in value)
            if all(type(item) is element for item in value):
                return value
        raise UserError(f"{path} = {_repr(value)}: a tuple of {_MANY[element]} is needed.")
    if type(value) is int and abs(value) >= _WHOLE:
        raise UserError(f"{path} = {_repr(value)}: a number below 2^63 is needed.")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise UserError(f"{path} = {_repr(value)}: {_KINDS[hint]} is needed.")
    return value


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return f"a {type(value).__name__} with a number too long to be shown"


_WHOLE = 2**63  # what no file and no array holds
_MANY = {int: "whole numbers", float: "numbers", str: "words"}
_KINDS = {int: "a whole number", float: "a finite number", str: "a string"}


def with_remat(cfg: Config, remat: str) -> Config:
    """Returns the configuration with this recomputation (compute.remat)."""
    return dataclasses.replace(cfg, compute=dataclasses.replace(cfg.compute, remat=remat))
