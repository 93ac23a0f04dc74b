"""The configuration that the program reads: frozen dataclasses, made from a ConfigDict or a saved run.

`lw_jax/core/config_sections.py` declares every key. This module is free of JAX: `configs/` imports it.
"""

import dataclasses
import hashlib
import itertools
import json
import re
import string
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from lw_jax.core.config_keys import Key, check, declared, refuse, suggest
from lw_jax.core.config_sections import (
    LLM,
    READ_BY,
    RECIPES,
    AnswerStage,
    Compute,
    Config,
    Data,
    Encoder,
    Eval,
    Loss,
    Optim,
    Prompt,
    Stage,
    Stages,
    Train,
)
from lw_jax.core.errors import UserError

# fmt: off
__all__ = [  # the sections are read as config.Data and so on
    "LLM", "AnswerStage", "Compute", "Config", "Data", "Encoder", "Eval", "Loss", "Optim", "Prompt", "Stages", "Train",
    "suggest",
]
# fmt: on


def split_prompt(user: str) -> tuple[str, str, str] | None:
    """Returns prompt.user before the context, between it and the question, and after that; {{ and }} are braces.

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


# Keys of speed, machine, reports and evaluation; all others decide what a run learns.
_MECHANICAL = re.compile(
    r"train\.(log_every|log_to|eval_every|checkpoint_every|micro_batch|alarm.*)|mesh\..*|compute\.(remat|logits_chunk)"
    r"|eval\..*|ttt\.form"
)

# recipe -> the values of compute.remat that it knows beside "auto", least recomputation first
REMATS = {"latentwire": ("none", "full"), "dpo": ("none", "full"), "ttt": ("none", "dots", "full")}

# Keys that the planner searches; a file's own values are one answer for one machine.
SEARCHED = ("mesh.placement", "mesh.data", "mesh.model", "compute.remat", "train.micro_batch")


class Values(Protocol):
    """Named values, nested: a dict or a ConfigDict, which is no Mapping."""

    def items(self) -> Any: ...


class Entry(NamedTuple):
    """One line of the reference."""

    path: str
    type: str
    default: Any
    key: Key
    hint: Any  # the type itself


def entries(kind: type = Config, prefix: str = "") -> Iterator[Entry]:
    """Yields every key in its order; a reader's stand once, under llms.NAME."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from entries(typing.cast(type, hint), f"{prefix}{field.name}.")
        elif typing.get_origin(hint) is dict:
            yield from entries(typing.get_args(hint)[1], f"{prefix}{field.name}.NAME.")
        else:
            name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
            yield Entry(f"{prefix}{field.name}", name, field.default, declared(field), hint)


def values_of(cfg: Config) -> Iterator[tuple[str, Any, Key]]:
    """Yields (path, value, what is declared of it) of every key of a configuration."""
    rules = {entry.path: entry.key for entry in entries()}
    for path, value in flatten(dataclasses.asdict(cfg)).items():
        yield path, value, rules[re.sub(r"^llms\.[^.]+", "llms.NAME", path)]


def read_by(path: str) -> tuple[str, ...]:
    """Returns the recipes and the kinds of encoder that read a key; empty: all do."""
    return next((names for regex, names in READ_BY if re.fullmatch(regex, path)), ())


def unread(cfg: Config) -> dict[str, Any]:
    """Returns the default of every key, by its path, that neither the recipe nor its kind of encoder reads."""
    kinds = {cfg.recipe, cfg.encoder.kind} if cfg.recipe == "latentwire" else {cfg.recipe}
    flat = flatten(defaults(cfg.recipe))
    return {path: value for path, value in flat.items() if (names := read_by(path)) and not kinds & {*names}}


def defaults(recipe: str) -> dict[str, Any]:
    """Returns the default of every key, nested; those of an unknown recipe are the first one's."""
    values = dataclasses.asdict(Config(recipe=recipe))
    for path, value in RECIPES.get(recipe, {}).items():
        section, name = path.split(".")
        values[section][name] = value
    return values


def build(values: Values) -> Config:
    """Returns the frozen configuration of a ConfigDict or a plain dict.

    Raises:
      UserError: a key is unknown or missing, or its value has another type than declared or is out of range.
    """
    return _build(Config, values, "")


def to_dict(cfg: Config) -> dict[str, Any]:
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


def flags(values: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that set these values, by path."""
    texts = {path: ",".join(map(str, value)) if isinstance(value, tuple) else value for path, value in values.items()}
    return [f"--config.{path}={text}" for path, text in texts.items()]


def diff(old: Values, new: Values) -> list[str]:
    before, after = ({path: repr(value) for path, value in flatten(values).items()} for values in (old, new))
    absent, paths = "(absent)", sorted(before.keys() | after.keys())
    changes = [(path, before.get(path, absent), after.get(path, absent)) for path in paths]
    return [f"{path}: {one} -> {other}" for path, one, other in changes if one != other]


def meaning(cfg: Config) -> dict[str, Any]:
    """Returns, by path, the values that decide what a run learns: the same on every machine and mesh."""
    return {path: value for path, value in flatten(to_dict(cfg)).items() if not _MECHANICAL.fullmatch(path)}


def shape(cfg: Config) -> dict[str, Any]:
    """Returns, by path, what a plan depends on: runs that differ in nothing else share one (`Key.shapes`).

    Of train.steps and the stages' shares it is the stages that have a step at all.
    """
    values = {
        path: bool(value) if rule.shapes == "zero" else value
        for path, value, rule in values_of(cfg)
        if rule.shapes != "no"
    }
    return values | {"stages": [name for name, _, _ in stages(cfg)]}


def identity(cfg: Config) -> str:
    """Returns 16 hex digits that are equal for an equal `meaning`, in any process and on any Python."""
    return hashlib.sha256(json.dumps(meaning(cfg), sort_keys=True).encode()).hexdigest()[:16]


def stages(cfg: Config) -> list[tuple[str, Stage, int]]:
    """Returns (name, stage, optimizer steps) of each stage that has a share of the run, in their order.

    The steps are rounded so that they add up to train.steps; `preflight` refuses a share too small for a step.
    """
    align, pretrain, answer = cfg.stages.align, cfg.stages.pretrain, cfg.stages.answer
    ends = [round(end * cfg.train.steps) for end in (0.0, align.share, align.share + pretrain.share, 1.0)]
    steps = [end - start for start, end in itertools.pairwise(ends)]
    named = zip(("align", "pretrain", "answer"), (align, pretrain, answer), steps, strict=True)
    return [(name, stage, count) for name, stage, count in named if count]


def tasks(cfg: Config) -> list[str]:
    """Returns the tasks of a wire's stages, those first that weigh most in the last one."""
    parts, last = stages(cfg), stages(cfg)[-1][1].tasks
    return sorted({task: None for _, stage, _ in parts for task in stage.tasks}, key=lambda task: -last.get(task, 0.0))


def _build(cls: type, values: Any, path: str) -> Any:
    """Returns a section; `path` ends with a dot, or is empty."""
    if not hasattr(values, "items"):
        refuse(path.removesuffix("."), values, "must be a section of keys (python run.py show --keys lists them all).")
    hints, raw = typing.get_type_hints(cls), dict(values.items())
    for key in raw:
        if key not in hints:
            rule = "is no known key (python run.py show --keys lists them all)."
            raise UserError(f"config.{path}{key} {rule}{suggest(key, hints)}")
    if missing := [key for key in hints if key not in raw]:
        rule = "is missing; start from base.get_config(), which gives every key a value."
        raise UserError(f"config.{path}{missing[0]} {rule}")
    kwargs = {}
    for field in dataclasses.fields(cls):
        value, hint, here = raw[field.name], hints[field.name], f"{path}{field.name}"
        if dataclasses.is_dataclass(hint):
            kwargs[field.name] = _build(typing.cast(type, hint), value, f"{here}.")
        elif typing.get_origin(hint) is dict:
            if not hasattr(value, "items"):
                refuse(here, value, "must be named entries, as in configs/default.py.")
            kind = typing.get_args(hint)[1]
            kwargs[field.name] = {str(name): _build(kind, entry, f"{here}.{name}.") for name, entry in value.items()}
        else:
            kwargs[field.name] = check(here, value, hint, declared(field))
    return cls(**kwargs)


def with_remat(cfg: Config, remat: str) -> Config:
    return dataclasses.replace(cfg, compute=dataclasses.replace(cfg.compute, remat=remat))
