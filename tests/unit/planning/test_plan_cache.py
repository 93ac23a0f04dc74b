"""lw_jax/planning/plan_cache.py and `config.shape`: which plans are one plan."""

import dataclasses
import json
import re
import shutil
from typing import Any

import jax
import pytest

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.planning import gpus, placement_search, plan_cache, plan_tables, planner
from lw_jax.planning.plans import StepPlan
from tests import tiny
from tests.tiny import make_searched_config

pytestmark = pytest.mark.usefixtures("cache")


def fail(*_, **__):
    raise AssertionError("planned again")


SWEEP = {
    **{"seed": 7, "optim.learning_rate": 7e-3, "optim.warmup_steps": 1, "optim.b2": 0.9, "optim.clip_norm": 3.0},
    **{"optim.end_fraction": 0.5, "optim.weight_decay": 0.3, "train.log_every": 3, "train.eval_every": 2},
    **{"train.checkpoint_every": 2, "train.alarm": "warn", "train.alarm_step": 0, "train.log_to": ()},
    **{"eval.examples": 5, "eval.curve": "none", "eval.curve_examples": 2, "data.cards": 70},
    **{"data.facts": 3, "data.validation_limit": 3, "data.overlong": "cut", "prompt.anchor": "\nSo:"},
    **{"stages.answer.rate": 2.0, "loss.ce": 0.5, "encoder.rate": 0.2, "llms.llama.template": "chat"},
}


def test_a_sweep_plans_once_and_has_its_own_hours(root, measure, cache, monkeypatch):
    cfg = make_searched_config(root, mesh__memory_gb=0.02, mesh__placement="replicate")
    first = planner.make(cfg, "h100x2", estimate=True)
    monkeypatch.setattr(gpus, "compile_devices", lambda target: jax.devices()[:2])
    planned = planner.make(cfg, "h100x2")
    assert not planned.cached and len(list(cache.iterdir())) == 1
    monkeypatch.setattr(placement_search, "choose", fail)
    again = planner.make(cfg, "h100x2")
    assert again == dataclasses.replace(planned, cached=True)
    assert "(cached)" in plan_tables.report(again) and "(cached)" not in plan_tables.report(planned)
    for path in ("seed", "optim.learning_rate", "train.eval_every"):  # a sweep may validate more or less often
        swept = planner.make(tiny.change(cfg, **{path: SWEEP[path]}), "h100x2")
        assert swept == dataclasses.replace(again, validation_hours=swept.validation_hours), path
    cfg = tiny.change(cfg, train__steps=600)
    longer = planner.make(cfg, "h100x2")
    assert longer.steps == 600 and first.steps == 6
    assert longer.hours == longer.chosen.hours == pytest.approx(100 * again.hours, rel=1e-12)
    assert longer.hours == pytest.approx(600 * longer.chosen.step_seconds / 3600, rel=1e-12)
    for one, other in zip(longer.candidates, again.candidates, strict=True):
        assert one.hours is other.hours is None or one.hours == pytest.approx(100 * other.hours)
    assert planner.kept(cfg, "h100x2") == longer
    assert len(list(cache.iterdir())) == 1


SHAPE = {
    **{"train.global_batch": 16, "train.micro_batch": 2, "mesh.memory_gb": 0.03, "mesh.target_utilisation": 0.7},
    **{"mesh.placement": "single", "compute.dtype": "bf16", "compute.remat": "full", "compute.logits_chunk": 8},
    **{"data.context_tokens": 240, "data.question_tokens": 32, "data.answer_tokens": 16, "encoder.slots": 6},
    **{"encoder.window": 128, "loss.kl": 1.0, "optim.kind": "muon", "optim.weight_decay": 0.0},
    **{"eval.batch": 4, "eval.max_new_tokens": 5, "eval.layers": "unstacked", "eval.rows": ("latents",)},
    **{"adapter.hidden": 41, "adapter.kind": "kv"},
    **{"llms.qwen.weights": "bf16", "stages.pretrain.share": 0.5, "encoder.rate": 0.0},
}


def test_what_shapes_a_step_or_its_limits_is_another_plan(root):
    cfg = make_searched_config(root, only="qwen")
    own = config.shape(cfg)
    assert not [path for path, value in SHAPE.items() if config.shape(tiny.change(cfg, **{path: value})) == own]
    larger = tiny.change(cfg, train__global_batch=16)
    assert plan_cache.path(larger, "h100x2") != plan_cache.path(cfg, "h100x2")


def test_another_target_version_or_memory_is_another_plan(root, monkeypatch):
    cfg = make_searched_config(root)
    files = [plan_cache.path(cfg, name) for name in ("h100x2", "h100x4", "here")]
    monkeypatch.setattr(plan_cache, "_versions", lambda: ["jax 0"])
    files.append(plan_cache.path(cfg, "h100x2"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_run=1")
    files.append(plan_cache.path(cfg, "h100x2"))
    assert len(set(files)) == len(files)


def test_several_processes_take_their_plans_from_the_cache_together(root, monkeypatch):
    cfg, made = make_searched_config(root), []
    plan = StepPlan(target="here", devices=1, per_host=1, compiled=True, chosen=None)
    monkeypatch.setattr(planner, "_plan", lambda cfg, on: made.append(1) or plan)
    for theirs, count in ((True, 1), (True, 1), (False, 2), (True, 2)):
        monkeypatch.setattr(planner.processes, "gather", lambda own, theirs=theirs: [own, theirs])
        planner.make(cfg)
        assert len(made) == count


def test_plan_that_cannot_be_kept_is_a_plan_and_a_warning(root, cache, monkeypatch, caplog):
    plan = StepPlan(target="here", devices=1, per_host=1, compiled=True, chosen=None)
    monkeypatch.setattr(planner, "_plan", lambda cfg, on: plan)
    cache.write_text("")  # no folder can be made there
    assert planner.make(make_searched_config(root)).chosen is None
    assert "LW_JAX_CACHE" in caplog.text


@pytest.mark.parametrize("where", ["encoder", "llms.llama"])
def test_another_model_under_the_same_path_is_another_plan(root, tmp_path, where):
    folder = shutil.copytree(root / "llama", tmp_path / "body")
    cfg = make_searched_config(root, encoder__kind="lm", encoder__source=str(root / "llama"))
    cfg = tiny.change(cfg, **{f"{where}.source": str(folder)})
    first = plan_cache.path(cfg, "h100x2")
    assert plan_cache.path(cfg, "h100x2") == first
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"intermediate_size": 2 * values["intermediate_size"]}))
    assert plan_cache.path(cfg, "h100x2") != first


def test_other_code_is_another_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_cache, "ROOT", tmp_path)
    seen = set()
    for name in ("lw_jax/models/decoder.py", "lw_jax/version.py", "sharding/tables.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
        seen.add(plan_cache.code())
    assert len(seen) == 3


# ---- that the keys left out do not shape a step

BARE = re.compile(r"dense<[^>]*>|constant [^:]*:|loc\(.*")


def programs(cfg: Config, devices: int) -> dict[str, str]:
    """The lowered text of a step without its numbers."""
    spec = tiny.outline(cfg, "replicate", devices)
    parts = spec.lower(spec.recipe.batch_widths(), 2)
    return {name: BARE.sub("", part.lowered.as_text()) for name, part in parts.items()}


def other_value(path: str, value: Any, rule: Any) -> Any:
    """Another legal value of a key; of one that counts whether it is 0, one on the same side."""
    if path in SWEEP:
        return SWEEP[path]
    if rule.choices and isinstance(value, str):
        return next(one for one in rule.choices if one != value)
    if isinstance(value, str):
        return value and f"{value} "
    if isinstance(value, tuple):
        return value
    if rule.shapes == "zero" and not value:
        return value
    return value + 1 if isinstance(value, int) else value * 0.75


@pytest.mark.slow
def test_a_step_is_the_same_program_whatever_the_other_keys_are(root):
    """All of them at once: `shapes="no"` and, on the same side of 0, `shapes="zero"`."""
    cfg = tiny.make_config(root)
    other = cfg
    kept = {"train.steps": 6}  # fewer would have other stages
    changed = []
    for path, value, rule in config.values_of(cfg):
        if rule.shapes != "value" and path not in kept:
            wanted = other_value(path, value, rule)
            changed += [path] if wanted != value else []
            other = tiny.change(other, **{path: wanted})
    assert len(changed) > 30 and config.shape(other) == config.shape(cfg)
    assert programs(other, 2) == programs(cfg, 2)
    one, another = (
        dataclasses.replace(planner.make(each, "h100x2", estimate=True), plan_seconds=0, validation_hours=0)
        for each in (cfg, other)
    )
    assert one == another


def test_every_key_says_whether_it_shapes_a_plan():
    """A new key counts until it says that it does not; those that say so are no sizes."""
    free = {entry.path for entry in config.entries() if entry.key.shapes == "no"}
    assert {"seed", "optim.learning_rate", "train.steps", "train.log_every"} <= free
    assert not {path for path in free if path.startswith(("mesh.", "compute."))}
