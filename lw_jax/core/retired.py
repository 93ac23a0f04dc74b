"""Removed, renamed and later added keys of the configuration.

Files and flags that name a removed one are refused with its successor. A kept run folder is translated; where a removed
key that decided the result had another value than the program has now, the folder is refused. A key that was added
later has, in older folders, the value under which nothing changes.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from lw_jax.core.errors import UserError

_ANY = object()  # of a key that did not decide what a run learns
_ABLATED = "the ablation found no gain (docs/experiments.md)"
_FIXED = "nobody varied it"
_Default = Any | Callable[[Mapping[str, Any]], Any]  # a value, or its function of the other values

# old key -> (key that took its place, the recipe that read it, its old default)
MOVED: dict[str, tuple[str, str, Any]] = {
    "loss.chunk": ("compute.logits_chunk", "latentwire", _ANY),
    "dpo.chunk": ("compute.logits_chunk", "dpo", _ANY),
    "ttt.loss_chunk": ("compute.logits_chunk", "ttt", _ANY),
    "dpo.held_out": ("data.held_out", "dpo", 0.1),
    "ttt.held_out": ("data.held_out", "ttt", 0.02),
}

# old key -> (the value that the program has now, reason or successor)
REMOVED: dict[str, tuple[_Default, str]] = {
    "adapter.calibration": ("init", _FIXED),
    "adapter.rate": (1.0, "set optim.learning_rate and encoder.rate"),
    "data.train_limit": (0, "name a smaller file or split in data.train"),
    "data.validation_cards": (256, "set data.validation_limit"),
    **dict.fromkeys(("loss.first", "loss.k", "loss.align", "loss.entropy", "loss.diversity"), (0.0, _ABLATED)),
    "loss.k_tokens": (4, _ABLATED),
    "prompt.question": ("text", _ABLATED),
    "loss.temperature": (1.0, _FIXED),
    "dpo.buckets": (4, _FIXED),
    "dpo.rpo_alpha": (0.0, "set dpo.loss=sigmoid,sft and dpo.weights"),
    "ttt.inner_start": (lambda flat: 0.1 if flat.get("ttt.inner") == "mlp" else 1.0, "it follows ttt.inner"),
    "ttt.unroll": (_ANY, "8 was measured to be the fastest"),
    "ttt.held_out_length": (_ANY, "held-out windows are as long as ttt.length x ttt.segments"),
    "optim.b1": (0.9, _FIXED),
    "optim.eps": (1e-8, _FIXED),
    "train.alarm_gap": (_ANY, _FIXED),
    "train.keep": (_ANY, "the 2 newest checkpoints and the best stay"),
    "eval.resamples": (_ANY, _FIXED),
    "eval.slots": (_ANY, "the curve measures the sizes of stages.answer.slots"),
    "eval.widths": (_ANY, "the curve measures the sizes of stages.answer.widths"),
    "eval.bits": (_ANY, "the curve measures 16, 8, 6, 4 and 2"),
    "selfmade.heads": (4, _FIXED),
    "selfmade.kv_heads": (2, _FIXED),
    "selfmade.ffn": (lambda flat: 2 * flat.get("selfmade.width", 0), "it is twice selfmade.width"),
    "stages.pretrain.continuation": (
        lambda flat: round(1.0 - flat.get("stages.pretrain.reconstruct", 0.0), 12),
        "it is 1 - stages.pretrain.reconstruct",
    ),
    "stages.answer.share": (
        lambda flat: round(1.0 - flat.get("stages.align.share", 0.0) - flat.get("stages.pretrain.share", 0.0), 12),
        "it is what stages.align.share and stages.pretrain.share leave of 1",
    ),
    **{
        f"stages.{stage}.{name}": (value, "the stages differ in what they train (python run.py show --keys)")
        for stage, values in {
            "align": {"reconstruct": 1.0, "continuation": 0.0, "answer": 0.0, "lengths": (32,), "encoder": 0.0}
            | dict.fromkeys(("slots", "widths", "bits"), ()),
            "pretrain": {"answer": 0.0, "rate": 1.0, "encoder": 1.0} | dict.fromkeys(("slots", "widths", "bits"), ()),
            "answer": {"reconstruct": 0.0, "continuation": 0.0, "answer": 1.0, "lengths": (64,), "encoder": 1.0},
        }.items()
        for name, value in values.items()
    },
}

# The same of keys that were added after the first run folders, whose digests lack them, and are gone again.
WITHDRAWN: dict[str, tuple[_Default, str]] = {"data.questions": (1, "set data.packed_tokens")}

# key -> old value -> new value
VALUES: dict[str, dict[str, str]] = {
    "train.alarm": {"tell": "warn"},
    "eval.layers": {"apart": "unstacked"},
    "dpo.reference": {"live": "recomputed", "kept": "cached"},
}

# keys that decide what a run learns and that older run folders lack -> what those runs did
ADDED: dict[str, Any] = {
    "adapter.kind": "embeddings",
    "encoder.ratio": 0,
    "encoder.rank": 0,
    "encoder.states": 0,
    "encoder.mask": "none",
    "encoder.texts": 400,
    "message.bytes": 256,
    "stages.answer.ratios": (),
    "data.packed_tokens": 0,
    "data.columns": (),
}


def explain(path: str) -> str:
    """Returns why a key is gone and what to set instead; empty where it never was one."""
    if path in MOVED:
        return f"was renamed: set {MOVED[path][0]}."
    removed = REMOVED | WITHDRAWN
    return f"was removed: {removed[path][1]}." if path in removed else ""


def translate(saved: Mapping[str, Any], flat: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run folder's saved values under the keys of today, with those that it lacks.

    Args:
      saved: the values, nested.
      flat: the same, by path.
      defaults: today's defaults of its recipe, by path.

    Raises:
      UserError: a removed key has a value that the program no longer has.
    """
    found = copy.deepcopy(dict(saved))
    for old, (new, recipe, _) in MOVED.items():
        _pop(found, old)
        if old in flat and recipe == flat.get("recipe"):
            _section(found, new)[new.rpartition(".")[2]] = flat[old]
    for new, _, _ in MOVED.values():
        _section(found, new).setdefault(new.rpartition(".")[2], defaults[new])
    for old, (default, _) in (REMOVED | WITHDRAWN).items():
        if old in flat:
            _pop(found, old)
            now = _value(default, flat)
            if now is not _ANY and flat[old] != now:
                rule = f"{explain(old).rstrip('.')}, and is {now!r}; read this folder with the version that wrote it."
                raise UserError(f"config.{old} = {flat[old]!r}: {rule}")
    for path, renamed in VALUES.items():
        if flat.get(path) in renamed:
            _section(found, path)[path.rpartition(".")[2]] = renamed[flat[path]]
    for path, value in ADDED.items():
        if path not in flat:
            _section(found, path)[path.rpartition(".")[2]] = value
    return found


def spell(meaning: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what decides a run, by path, as checkpoints have recorded it since the first: under the old keys."""
    spelled = {path: value for path, value in meaning.items() if path not in ADDED or value != ADDED[path]}
    for path, renamed in VALUES.items():
        if path in spelled:
            spelled[path] = {new: old for old, new in renamed.items()}.get(spelled[path], spelled[path])
    for old, (new, recipe, default) in MOVED.items():
        if default is not _ANY:
            spelled[old] = meaning[new] if recipe == meaning["recipe"] else default
    for new, _, _ in MOVED.values():
        spelled.pop(new, None)
    removed = {old: _value(default, meaning) for old, (default, _) in REMOVED.items()}
    return spelled | {old: value for old, value in removed.items() if value is not _ANY}


def _value(default: _Default, flat: Mapping[str, Any]) -> Any:
    return default(flat) if callable(default) else default


def _section(values: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.split(".")[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):  # a damaged file, for `config.build` to refuse
            return {}
    return values


def _pop(values: dict[str, Any], path: str) -> None:
    _section(values, path).pop(path.rpartition(".")[2], None)
