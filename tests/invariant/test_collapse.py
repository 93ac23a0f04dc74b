"""A run whose latents are worth no more than another text's is stopped with the word and the figures."""

import json
import re
import shutil

import pytest

from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.recipes import curriculum
from lw_jax.training import preflight
from tests import tiny

# Nothing is learned, and the accidental gap of a random encoder stays below the one asked for.
USELESS = {"optim__learning_rate": 1e-12, "train__alarm_step": 4, "train__checkpoint_every": 6, "only": "llama"}


@pytest.fixture(autouse=True)
def wide_gap(request, monkeypatch):
    if request.node.name != "test_run_that_learns_is_not_stopped":
        monkeypatch.setattr(curriculum, "GAP", 0.5)


def test_useless_latents_stop_the_run_with_word_and_figures_and_the_checkpoint_stays(root, tmp_path, capsys):
    recipe = tiny.make_recipe(root, **USELESS)
    with pytest.raises(UserError) as raised:
        tiny.curve(recipe, tmp_path / "run")
    told = str(raised.value)
    (row,) = tiny.logged_rows(tmp_path / "run", "validation/loss")
    assert told.startswith("collapse at step 4: ") and row["step"] == 4
    nll, other = row["validation/nll/llama"], row["validation/shuffled/nll/llama"]
    assert nll != other, "the shuffled texts must be others"
    assert f"nll/llama {nll:.3f}" in told and f"{other - nll:+.3f}" in told
    assert "train.alarm=" in told and "train.alarm_step" in told
    assert "collapse at step 4" in capsys.readouterr().out
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["4"]


@pytest.mark.slow
def test_run_that_only_reports_continues_to_its_end_and_one_without_an_alarm_is_silent(root, tmp_path, capsys):
    code, losses, _ = tiny.curve(tiny.make_recipe(root, **USELESS, train__alarm="warn"), tmp_path / "run")
    assert code == 0 and len(losses) == 6
    told = [line for line in capsys.readouterr().out.splitlines() if "collapse at step" in line]
    assert [line.split("collapse at step ")[1][0] for line in told] == ["4", "6"], "and at the end again"
    code, _, _ = tiny.curve(tiny.make_recipe(root, **USELESS | {"train__alarm_step": 0}), tmp_path / "off")
    assert code == 0 and "collapse" not in capsys.readouterr().out


@pytest.mark.slow
def test_run_shorter_than_the_alarm_s_step_is_judged_at_its_last_and_at_each_start_after_it(
    root, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(preflight, "FEWEST_JUDGED", 6)
    changes = USELESS | {"train__alarm_step": 500, "train__eval_every": 3}
    with pytest.raises(UserError, match="^collapse at step 6: "):
        tiny.curve(tiny.make_recipe(root, **changes), tmp_path / "run")
    assert "collapse at step 3" not in capsys.readouterr().out
    before = (tmp_path / "run" / "metrics.jsonl").read_text().count("validation/loss")
    with pytest.raises(UserError, match="^collapse at step 6: ") as raised:
        tiny.curve(tiny.make_recipe(root, **changes), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("validation/loss") == before
    advised = re.findall(r"--config\.train\.(\w+)=(\w+)", str(raised.value))
    assert len(advised) == 2
    for key, value in advised:
        shutil.copytree(tmp_path / "run", tmp_path / key)
        mended = changes | {f"train__{key}": int(value) if value.isdecimal() else value}
        code, losses, _ = tiny.curve(tiny.make_recipe(root, **mended), tmp_path / key)
        assert code == 0 and len(losses) == 6


def write_words(path):
    """Five texts that differ by one letter, each with an answer of its own."""
    words = ["red", "green", "blue", "black", "white"]
    examples = [Example(str(i), f"The door is {chr(97 + i)}.", "Which?", (word,)) for i, word in enumerate(words)]
    rows = [{"context": e.context, "question": e.question, "answers": list(e.answers)} for e in examples]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_run_that_learns_is_not_stopped(root, tmp_path):
    """Learnt by heart, for validation is the training data: another text's latents then give another's answer."""
    data = {"data__train": write_words(tmp_path / "a.jsonl"), "data__validation": write_words(tmp_path / "b.jsonl")}
    steps = dict.fromkeys(("train__steps", "train__alarm_step", "train__checkpoint_every"), 60)
    batches = {"train__global_batch": 5, "eval__batch": 5}
    recipe = tiny.make_recipe(root, only="llama", optim__learning_rate=1e-2, **data, **steps, **batches)
    code, losses, _ = tiny.curve(recipe, tmp_path / "run")
    (row,) = tiny.logged_rows(tmp_path / "run", "validation/loss")
    gap = row["validation/shuffled/nll/llama"] - row["validation/nll/llama"]
    assert code == 0 and losses[-1] < losses[0]
    assert gap > 2 * curriculum.GAP, "by a margin, or the test says nothing"


@pytest.mark.slow
def test_trial_of_a_few_steps_is_not_judged(root, tmp_path, capsys):
    changes = USELESS | {"train__alarm_step": 500, "train__steps": 2}
    code, _, _ = tiny.curve(tiny.make_recipe(root, **changes), tmp_path / "run")
    assert code == 0 and "collapse" not in capsys.readouterr().out
