"""lw_jax/training/preflight.py and recipes: faults that make a run worthless are named before it starts."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from lw_jax.core import config, config_file, validation
from lw_jax.core.errors import UserError
from lw_jax.planning import planner
from lw_jax.training import preflight
from lw_jax.training.recipe import Finding
from tests import tiny

ROOT = Path(__file__).resolve().parents[3]


def load(name, **changes):
    values = config_file.load(name, root=ROOT)
    values.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    cfg = config.build(values)
    validation.validate(cfg)
    return cfg


def texts(cfg):
    return [str(one) for one in planner.inspect(cfg)]


def test_errors_stop_a_run_and_warnings_do_not():
    assert texts(load("configs/h100x4.py")) == []
    warning, error = Finding("warning", "slow"), Finding("error", "void")
    preflight.refuse([warning])
    with pytest.raises(UserError, match="^void$"):
        preflight.refuse([error, warning])


SMOKE, SQUAD, TTT = "configs/smoke.py", "configs/squad.py", "configs/ttt/ttt_smoke.py"


LATE = {"train__steps": 700, "train__eval_every": 900}


@pytest.mark.parametrize(
    ("name", "changes", "level", "key"),
    [
        ("configs/dpo/vicuna.py", {}, "warning", "rows not checked: pairs.jsonl"),
        # the first stage has 600 of 12,000 steps
        (SQUAD, {"optim__warmup_steps": 700}, "error", "optim.warmup_steps"),
        (SQUAD, {"train__steps": 20}, "", "stages.pretrain.lengths"),
        (
            SQUAD,
            {"train__steps": 20, "stages__align__share": 0.02},
            "error",
            "train.steps=20 gives no step to stage align",
        ),
        (
            SMOKE,
            {"train__steps": 20, "stages__align__share": 0.98},
            "error",
            "train.steps=20 gives no step to stage answer",
        ),
        (
            SMOKE,
            {"train__steps": 10, "stages__pretrain__share": 0.05},
            "error",
            "train.steps=10 gives no step to stage",
        ),
        (SQUAD, {"train__steps": 20, "stages__pretrain__share": 0.1}, "warning", "stages.pretrain.lengths"),
        (SMOKE, {}, "", "train.checkpoint_every"),
        (SMOKE, {"train__eval_every": 0}, "warning", "train.checkpoint_every"),
        (SMOKE, LATE, "", "train.eval_every"),  # a validation at the alarm's step is one before the end
        (SMOKE, LATE | {"train__alarm_step": 0}, "warning", "train.eval_every"),
        (SMOKE, {"train__alarm_step": 0}, "warning", "train.alarm_step"),
        (SMOKE, {"train__steps": 40}, "warning", "train.alarm_step"),
        (SMOKE, {"train__steps": 40, "train__alarm_step": 40}, "", "train.alarm_step"),
        (TTT, {}, "", "train.alarm_step"),
    ],
)
def test_setting_that_spoils_a_run_is_named(name, changes, level, key):
    found = [line for line in texts(load(name, **changes)) if key in line]
    assert [line.startswith(f"{level}: {key}") for line in found] == [True] * bool(level)


@pytest.mark.parametrize(
    ("model", "warmup", "steps", "void"),
    [("tinyllama", 50, 60, False), ("stablelm", 50, 53, False), ("phi3", 75, 120, False), ("vicuna", 100, 60, True)],
)
def test_each_of_the_seed_s_configurations_is_caught(model, warmup, steps, void):
    found = texts(load(f"configs/dpo/{model}.py:seed"))
    (first,) = [line for line in found if f"optim.warmup_steps={warmup}" in line and f"{steps} steps" in line]
    assert first.startswith("error" if void else "warning")
    errors = [line.startswith("error") for line in found]
    assert errors == sorted(errors, reverse=True)
    assert any("dpo.max_prompt=512" in line and line.startswith("error") for line in found) == (model == "tinyllama")
    for key in ("eval_every", "checkpoint_every"):
        assert any(line.startswith(f"warning: train.{key}=") for line in found)
    assert any("optim.learning_rate=" in line for line in found) == (model == "vicuna")


def test_a_step_that_is_validated_is_saved_too():
    train = load(SMOKE).train
    assert (train.steps, train.eval_every, train.checkpoint_every) == (150, 50, 200)
    for changes, interval in (({}, 50), ({"eval_every": 0}, 150), ({"checkpoint_every": 20}, 20)):
        assert preflight.save_interval(dataclasses.replace(train, **changes)) == interval
    for name, step in (("embeddings", 150), ("default", 30), ("squad", 2000)):
        assert preflight.alarm_step(load(f"configs/{name}.py").train) == step


def test_lengths_beyond_a_model_s_positions_are_told():
    (error,) = [line for line in texts(load("configs/dpo/tinyllama.py", dpo__max_length=2049)) if "positions" in line]
    assert error.startswith("error: dpo.max_length=2049: ")
    asked = {"data__context_tokens": 9000, "data__answer_tokens": 500}
    (found,) = [line for line in texts(load("configs/squad.py", **asked)) if "positions" in line]
    assert found.startswith("warning: reader 'llama': ") and "data.context_tokens and data.answer_tokens" in found
    untaught = texts(load("configs/squad.py", **asked, loss__kl=0.0))
    assert not any("positions" in line for line in untaught), "no step reads the text"
    wide = texts(load("configs/squad.py", **asked, loss__kl=0.0, data__question_tokens=8000))
    assert sum("data.question_tokens and data.answer_tokens" in line for line in wide) == 1, wide
    passages = texts(load("configs/squad.py", **asked, loss__kl=0.0, stages__pretrain__lengths=(8180,)))
    assert sum("encoder.slots and the stages' lengths allow" in line for line in passages) == 1, passages


@pytest.mark.parametrize(("steps", "told"), [(400, ["8.5 times"]), (12, [])])
def test_a_text_that_is_read_too_often_is_told(tmp_path, steps, told):
    found = [str(one) for one in tiny.make_ttt(tmp_path, train__steps=steps).findings()]
    assert [count in line for count, line in zip(told, found, strict=True)] == [True] * len(told), found
    assert all(line.startswith(f"warning: train.steps={steps} reads each of ") for line in found)


@pytest.mark.parametrize(("inner", "rate", "told"), [("mlp", 1.0, 1), ("mlp", 0.1, 0), ("linear", 1.0, 0)])
def test_an_inner_rate_at_which_an_mlp_diverges_is_told(inner, rate, told):
    found = texts(load(TTT, ttt__inner=inner, ttt__inner_rate=rate))
    assert sum(line.startswith("warning: ttt.inner_rate=1 ") for line in found) == told, found


@pytest.mark.parametrize("apart", [0, 3, 9])
def test_held_out_texts_that_are_trained_on_are_reported(tmp_path, root, apart):
    rows = [{"context": f"Mara has {n} lamps.", "question": "How many?", "answers": [str(n)]} for n in range(9)]
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    other = {"context": "Tom owns a kite.", "question": "What?", "answers": ["a kite"]}
    train.write_text("".join(json.dumps(row) + "\n" for row in [*rows[apart:], other]), "utf-8")
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    recipe = tiny.make_recipe(root, only="llama", data__train=str(train), data__validation=str(held_out))
    found = [str(one) for one in recipe.findings()]
    said = f"warning: of 9 texts of config.data.validation are also {9 - apart} in config.data.train: "
    assert [one.startswith(said) for one in found] == [True] * (apart < 9), found
    repeated = {"data__passages": str(held_out), "data__columns": ("text:context",)}
    given = {"data__train": str(train), "data__validation": str(held_out), "stages__pretrain__share": 1.0}
    recipe = tiny.make_recipe(root, only="llama", data__validation_limit=2, eval__examples=9, **given | repeated)
    (found,) = (str(one) for one in recipe.findings())
    both = f"{9 - apart} in config.data.train and " * (apart < 9) + "9 in config.data.passages: "
    assert found.startswith(f"warning: of 9 texts of config.data.validation are also {both}")


@pytest.mark.parametrize(("words", "key"), [(400, "dpo.max_length=128"), (3, "dpo.max_prompt=9"), (3, "")])
def test_prompts_that_fill_the_length_are_counted_where_the_rows_are_here(tmp_path, words, key):
    tiny.write_reader(tmp_path / "model", "llama")
    long = "The home of Lena is in Dallas. " * words
    rows = [
        {"prompt": f"{i}: {long if i % 4 else ''}Where?", "chosen": "Dallas", "rejected": "Havana"} for i in range(60)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"dpo__max_prompt": 9} if "max_prompt" in key else {}
    cfg = load("configs/dpo/tinyllama.py", data__train=str(tmp_path / "pairs.jsonl"), dpo__max_length=128, **limits)
    llm = dataclasses.replace(cfg.llms["policy"], source=str(tmp_path / "model"), template="plain", weights="fp32")
    found = texts(dataclasses.replace(cfg, llms={"policy": llm}))
    dropped = [line for line in found if "training pairs are dropped" in line]
    assert [key in line and line.startswith("error: ") for line in dropped] == [True] * bool(key)
    assert any("train.steps=" in line for line in found), "200 steps of 16 read 54 pairs often"


def test_each_source_that_is_not_here_is_told(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "saved").mkdir()
    named = f"{tmp_path}/a.jsonl,{tmp_path}/gone.jsonl,hub:a/b"
    cfg = load("configs/smoke.py", data__train=named, data__validation=f"{tmp_path}/saved:test")
    (told,) = preflight.missing_data(cfg)
    assert told.startswith(f"data.train='{tmp_path}/gone.jsonl': no such file or folder")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ["pip install datasets" in line for line in preflight.missing_data(cfg)] == [False, True]
